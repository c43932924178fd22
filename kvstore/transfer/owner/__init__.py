"""The side of a segment's owner: ``server`` says who may write which block, and listens."""
