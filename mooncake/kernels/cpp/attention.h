// Paged attention that reads pages in place; attention.cpp says how. Shape letters are those of reference.py.
#pragma once

#include "attention_plan.h"

namespace mooncake {

// Attends as planned, on up to `threads` threads.
void attend(const AttentionCall& call, const AttentionPlan& plan, const CacheLayer& cache, int threads);

inline int check_tables(const AttentionCall& call, const CacheLayer& cache) {
    for (int seq = 0; seq < call.num_sequences; seq++) {
        const int blocks = (call.context_lens[seq] + cache.block_tokens - 1) / cache.block_tokens;
        if (blocks > call.table_stride) return BAD_BLOCK;
        if (call.first_positions ? call.first_positions[seq] < 0 : call.tokens(seq) > call.context_lens[seq]) return BAD_POSITION;
        for (int i = 0; i < blocks; i++)
            if (call.table(seq)[i] < 0 || call.table(seq)[i] >= cache.num_blocks) return BAD_BLOCK;
    }
    return OK;
}

}  // namespace mooncake
