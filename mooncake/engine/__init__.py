"""Sequences in, steps of ragged batches, tokens out: ``scheduler`` plans, ``engine`` runs, ``loop`` is its thread."""
