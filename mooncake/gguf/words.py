"""How byte-level tokenizers cut text into words before merging, by the names in ``tokenizer.ggml.pre``.

The patterns are those in each model's published tokenizer.json; "isolated" keeps every match.
"""

from __future__ import annotations

from tokenizers import Regex, normalizers, pre_tokenizers

from mooncake.text.tiktoken_file import KIMI_WORDS

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_WORDS = _QWEN2_WORDS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_SEED_WORDS = _QWEN2_WORDS.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")

# Words end where a lower-case letter is followed by an upper-case one (o200k, Tekken).
_START, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O_WORDS = (
    rf"{_START}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_START}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_REST}"
)
_TEKKEN_WORDS = rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_REST}"

# In these a word that is a token needs no merges.
LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
TEKKEN = ("tekken",)
KIMI = ("kimi-k2",)

_GPT2 = ("gpt-2", "default", "phi-2", "mpt", "olmo", "exaone4", "a.x-4.0", "gigachat")
_DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")  # then GPT-2's words
_FALCON = ("falcon",)
_PATTERNS: dict[str, str] = {
    **dict.fromkeys(LLAMA3, _LLAMA3_WORDS),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3_WORDS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"), _QWEN2_WORDS),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), _GPT4O_WORDS),
    **dict.fromkeys(TEKKEN, _TEKKEN_WORDS),
    "bloom": r" ?[^(\s|.,!?…。，、।۔،)]+",
    "qwen35": _QWEN35_WORDS,
    "seed-coder": _SEED_WORDS,
    **dict.fromkeys(KIMI, KIMI_WORDS),
}
# DeepSeek-V3 cuts numbers off first, then runs of Chinese and Japanese.
_DEEPSEEK = ("deepseek-v3", "hunyuan-dense")
_DEEPSEEK_WORDS = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# DeepSeek-V2 cuts at each step what the steps before have left, and then digits. Its letters are those with two cases,
# as older versions of Unicode knew them.
_NOT_YET_CASED = (
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\uab68"
    "\U00010570-\U000105bc\U00010d50-\U00010d85\U00016e40-\U0001df2a"
)
_EAST_ASIAN = r"[一-龥\u0800-一\uac00-\ud7ff]+"
_IN_STEPS: dict[str, tuple[str, ...]] = {
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_NOT_YET_CASED}]]+",
        r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        _EAST_ASIAN,
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN),
}
_NFC = ("qwen2", "qwen35", "deepseek-r1-qwen", "command-r")


def known_words() -> tuple[str, ...]:
    """Every name that ``words_of`` knows."""
    return (*_GPT2, *_DIGIT_BY_DIGIT, *_FALCON, *_DEEPSEEK, *_IN_STEPS, *_PATTERNS)


def words_of(name: str) -> tuple[pre_tokenizers.PreTokenizer | None, normalizers.Normalizer | None]:
    """The pre-tokenizer of this name, None for an unknown one, and the normalizer that comes with it."""
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _PATTERNS:
        steps = [pre_tokenizers.Split(Regex(_PATTERNS[name]), "isolated"), bytes_alone]
    elif name in _DEEPSEEK:
        steps = [*(pre_tokenizers.Split(Regex(words), "isolated") for words in _DEEPSEEK_WORDS), bytes_alone]
    elif name in _IN_STEPS:
        cuts = [pre_tokenizers.Split(Regex(words), "isolated") for words in _IN_STEPS[name]]
        steps = [*cuts, pre_tokenizers.Digits(individual_digits=True), bytes_alone]
    elif name in _DIGIT_BY_DIGIT:
        steps = [pre_tokenizers.Digits(individual_digits=True), words]
    elif name in _FALCON:
        threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
        numbers = pre_tokenizers.Digits(individual_digits=False)
        steps = [pre_tokenizers.Punctuation("contiguous"), words, numbers, threes]
    elif name in _GPT2:
        steps = [words]
    else:
        return None, None
    return pre_tokenizers.Sequence(steps), normalizers.NFC() if name in _NFC else None
