"""What travels next, and over which path: decisions and accounts, which ``link`` keeps under its lock."""
