"""What a run is told by: its summary, charts and a page, and the published figures beside them."""
