"""What ``mooncake bench gpu`` measures, a module for each kind of part. ``device`` is what all of them time with."""
