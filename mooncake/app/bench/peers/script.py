"""Times another engine: a script run by that engine's Python interpreter, with one task per line.

It imports nothing of ours, because that interpreter does not have our ``mooncake``. Each line on stdin is a
JSON object ``{"prompts": [[token, …], …], "new": n}``; each answer on stdout is ``{"s": seconds}`` for generating
exactly ``n`` greedy tokens for every prompt. The first line of output says what was started.

    python script.py vllm|transformers|llama.cpp MODEL --dtype float32 --threads 2
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], None]


def start_vllm(model: str, dtype: str, threads: int, max_model_len: int) -> Generate:
    """vLLM's offline engine with its prefix cache, without detokenizing; its environment says on which cores."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=64,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )

    def generate(prompts: Prompts, new: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        if any(len(answer.outputs[0].token_ids) != new for answer in answers):
            raise RuntimeError(f"vLLM did not give {new} tokens for every prompt")

    return generate


def start_transformers(model: str, dtype: str, threads: int, max_model_len: int) -> Generate:
    """``generate`` of transformers over a batch without padding; each call computes whole prompts (no prefix cache)."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    options: dict[str, object] = {"dtype": getattr(torch, dtype), "local_files_only": True}
    folder = model
    if model.endswith(".gguf"):
        from transformers import GgufConfig

        folder, file_name = os.path.split(model)
        options |= {"gguf_file": file_name, "quantization_config": GgufConfig(dequantize=True)}
    lm: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    lm.eval()

    def generate(prompts: Prompts, new: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            answer = lm.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
            )
        if answer.shape[1] != ids.shape[1] + new:
            raise RuntimeError(f"transformers did not give {new} tokens for every prompt")

    return generate


LLAMA_SEQUENCES = 32  # each has room for a whole context


def start_llama(model: str, dtype: str, threads: int, max_model_len: int) -> Generate:
    """llama.cpp, with the codes of a .gguf file whatever ``dtype`` is. As its server does, it keeps the KV of the last
    prompts: when they come again, it computes their last tokens alone."""
    import llama_cpp as lib  # type: ignore[import-not-found]
    import numpy as np

    lib.llama_backend_init()
    weights = lib.llama_model_load_from_file(os.fsencode(model), lib.llama_model_default_params())
    if not weights:
        raise RuntimeError(f"llama.cpp does not read {model}")
    settings = lib.llama_context_default_params()
    settings.n_threads = settings.n_threads_batch = threads
    settings.n_seq_max, settings.n_ctx = LLAMA_SEQUENCES, LLAMA_SEQUENCES * max_model_len
    context = lib.llama_init_from_model(weights, settings)
    memory, num_words = lib.llama_get_memory(context), lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(weights))
    batch = lib.llama_batch_init(settings.n_batch, 0, 1)
    kept: Prompts = []

    def compute(tokens: list[tuple[int, int, int]], last: set[int]) -> dict[int, int]:
        """The likeliest tokens after those at ``last``; each token is a sequence, a position and an id."""
        after = {}
        for begin in range(0, len(tokens), settings.n_batch):
            some = tokens[begin : begin + settings.n_batch]
            for i, (sequence, position, token) in enumerate(some):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, begin + i in last
            batch.n_tokens = len(some)
            if lib.llama_decode(context, batch) != 0:
                raise RuntimeError("llama.cpp could not compute a batch")
            for i, (sequence, _, _) in enumerate(some):
                if begin + i in last:
                    logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (num_words,))
                    after[sequence] = int(logits.argmax())
        return after

    def generate(prompts: Prompts, new: int) -> None:
        nonlocal kept
        if prompts == kept:
            begins = [len(prompt) - 1 for prompt in prompts]
            for sequence, begin in enumerate(begins):
                lib.llama_memory_seq_rm(memory, sequence, begin, -1)
        else:
            begins, kept = [0] * len(prompts), prompts
            lib.llama_memory_clear(memory, False)
        tokens, last = [], set()
        for sequence, (prompt, begin) in enumerate(zip(prompts, begins, strict=True)):
            tokens += [(sequence, position, prompt[position]) for position in range(begin, len(prompt))]
            last.add(len(tokens) - 1)
        for step in range(new):
            after = compute(tokens, last)
            tokens = [(sequence, len(prompts[sequence]) + step, token) for sequence, token in after.items()]
            last = set(range(len(tokens)))

    return generate


STARTS = {"vllm": start_vllm, "transformers": start_transformers, "llama.cpp": start_llama}
MODULES = {"llama.cpp": "llama_cpp"}  # of engines whose module has another name


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=STARTS)
    parser.add_argument("model", help="an HF folder; transformers also takes a .gguf file, llama.cpp nothing else")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--max-model-len", type=int, default=4096)
    options = parser.parse_args()

    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # only for answers: output of the engine goes to stderr
    os.dup2(2, 1)
    begin = time.perf_counter()
    generate = STARTS[options.engine](options.model, options.dtype, options.threads, options.max_model_len)
    start_s = time.perf_counter() - begin
    modules = ("torch", MODULES.get(options.engine, options.engine))
    versions = {name: version(name) for module in modules for name in _distributions(module)}
    answers.write(json.dumps({"ready": options.engine, "versions": versions, "start_s": start_s}) + "\n")
    for line in sys.stdin:
        task = json.loads(line)
        begin = time.perf_counter()
        generate(task["prompts"], task["new"])
        answers.write(json.dumps({"s": time.perf_counter() - begin}) + "\n")


def _die_with_parent() -> None:
    """End this process when its parent dies, even during a task of minutes. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _distributions(module: str) -> list[str]:
    """The installed distributions that have a module."""
    from importlib.metadata import packages_distributions

    return sorted(set(packages_distributions().get(module, [])))


if __name__ == "__main__":  # vLLM starts its processes by running this module again
    main()
