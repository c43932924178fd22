"""What ``bench engine`` can be asked, and the limits of the machine that it compares with."""
