"""The APIs that clients speak: each translates its own fields to a job, and words what comes back."""
