"""KV in the layout of another deployment: what moves where (``plan``), moved (``reader``) and converted."""
