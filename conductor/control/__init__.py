"""Controllers in pairs: one decides, purely, and one acts. Health, roles and replicas of hot prefixes."""
