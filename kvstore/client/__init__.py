"""Clients of the pool: of any number of stores (``pool``), and of one (``store_client``)."""
