"""How nodes become processes: one by itself (``role_main``), a cluster on this machine (``local``), or Ray actors."""
