"""What nodes add to an engine: settings, its thread's start and end, measurements, adapters that come and go."""
