"""The benchmarks, one module each: ``mooncake bench NAME``. ``report`` is what all of them print."""
