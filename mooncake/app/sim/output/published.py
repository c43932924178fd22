"""Published figures that we reproduce, as printed or read off plots.

FAST'25 is "Mooncake: Trading More Storage for Less Computation", arXiv its longer version, 2407.00079. Times are in
seconds, TBT in milliseconds, and shares in percent, except those called rates.
"""

from __future__ import annotations

# FAST'25 Fig. 5: mean TTFT of three placement policies, over that of the global cache-aware one.
FIG5_RATIOS = {"random": 6.4, "least_loaded": 1.72, "local_cache_aware": 1.17}
FIG5_GLOBAL_TTFT_S = 3.07

# FAST'25 Figs 6 and 7: requests inside TTFT 30 s and each limit on TBT; gain over the best baseline.
FIG6_TBT_MS = (100, 200, 300)
FIG6_SHARES = {
    "conversation": {
        "paper-16": (96.9, 100, 100),
        "vllm-16": (16.4, 39.1, 63.0),
        "vllm-prefix-16": (15.4, 34.6, 56.2),
        "vllm-chunked-16": (9.7, 29.1, 55.6),
    },
    "synthetic": {
        "paper-16": (99.9, 100, 100),
        "vllm-16": (61.6, 71.2, 78.3),
        "vllm-prefix-16": (61.2, 71.1, 77.5),
        "vllm-chunked-16": (46.8, 57.6, 69.7),
    },
}
FIG6_GAINS = {"conversation": (498, 157, 59), "synthetic": (62, 40, 28)}

# FAST'25 Fig. 9: hit rate (by token) of one LRU cache by capacity in tokens; None: infinite.
FIG9_TOKENS = (1e4, 1e5, 1e6, 2e6, 4e6, 5e6, 8e6, 1e7, 5e7, None)
FIG9_RATES = {
    "conversation": (0.047, 0.075, 0.089, 0.122, 0.217, 0.249, 0.302, 0.328, 0.400, 0.403),
    "synthetic": (0.002, 0.014, 0.148, 0.237, 0.382, 0.437, 0.547, 0.590, 0.660, 0.660),
}

# FAST'25 Fig. 10: hit rates with local caches and with a global one, and machine time of the second over the first.
FIG10 = {"conversation": (17.0, 38.0, 0.76), "synthetic": (26.5, 62.5, 0.52), "toolagent": (42.0, 58.0, 0.74)}

# FAST'25 Fig. 13: mean TTFT by network bandwidth in Gbit/s, and with everything recomputed.
FIG13_TTFT_S = {24: 5.12, 40: 2.42, 80: 1.75, 100: 1.62, 160: 1.43, 320: 1.26}
FIG13_ANEW_TTFT_S = 2.6

# FAST'25 Fig. 15: by number of prefill machines of 16: effective requests, mean TTFT, mean TBT.
FIG15 = {
    5: (77.7, 5.75, 31.6),
    6: (97.3, 1.73, 31.9),
    7: (99.1, 1.32, 33.0),
    8: (99.0, 1.20, 35.1),
    9: (99.2, 1.14, 38.4),
    10: (98.5, 1.12, 44.3),
    11: (86.2, 1.15, 58.4),
}

# arXiv Table 3: number of requests, and of rejected ones by admission; Fig. 8: mean TTFT without overload.
TABLE3_REJECTED = {"baseline": 4183.0, "early": 3771.0, "predicted": 3589.0}
TABLE3_REQUESTS = 23_000
FIG8_TTFT_S = 6.26
