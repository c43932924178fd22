"""Controllers in pairs: one decides, purely, and one acts. Health, roles and copies of hot prefixes."""
