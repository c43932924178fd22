// Paged attention that reads pages in place; attention.cpp says how. Shape letters are those of reference.py.
#pragma once

#include "attention_plan.h"

namespace mooncake {

// Attends as planned, on up to `threads` threads.
void attend(const AttentionCall& call, const AttentionPlan& plan, const CacheLayer& cache, int threads);

inline bool rises(const int32_t* positions, int count) {
    return std::is_sorted(positions, positions + count) && (count == 0 || positions[0] >= 0);
}

inline int check_tables(const AttentionCall& call, const CacheLayer& cache) {
    for (int seq = 0; seq < call.num_sequences; seq++) {
        const int blocks = (call.context_lens[seq] + cache.block_tokens - 1) / cache.block_tokens;
        if (blocks > call.table_stride) return BAD_BLOCK;
        if (!call.positions && call.tokens(seq) > call.context_lens[seq]) return BAD_POSITION;
        if (call.positions && !rises(call.positions + call.query_starts[seq], call.tokens(seq))) return BAD_POSITION;
        for (int i = 0; i < blocks; i++)
            if (call.table(seq)[i] < 0 || call.table(seq)[i] >= cache.num_blocks) return BAD_BLOCK;
    }
    return OK;
}

}  // namespace mooncake
