"""The curated cases of windows, softcap, ALiBi and dropout, one or several. cases.py has those without them."""

from __future__ import annotations

from .cases import Case

_SQUARE = (1, 2, 2, 200, 200, 64)  # batch, nheads, nheads_k, seqlen_q, seqlen_k, headdim: more than a tile
_MORE_KEYS = (1, 2, 1, 130, 300, 64)
_MORE_QUERIES = (1, 2, 1, 300, 130, 64)
_RAGGED = (2, 4, 2, 113, 203, 64)

_WINDOWS = [
    Case("window", "a band, narrower than a tile on either side", *_SQUARE, window_size=(17, 9)),
    Case("window_more_keys", "the band starts at key 170", *_MORE_KEYS, window_size=(40, 25)),
    Case(
        "window_more_queries", "the first rows have no key, others part of a band", *_MORE_QUERIES, window_size=(20, 5)
    ),
    Case("window_empty_rows_left", "rows before the first key", 1, 2, 2, 200, 70, 64, window_size=(3, 0)),
    Case("window_0_0", "each query sees the one key at its place", *_SQUARE, window_size=(0, 0)),
    Case("window_0_0_more_queries", "one key, or none", *_MORE_QUERIES, window_size=(0, 0)),
    Case("window_0_0_decode", "one query, which sees the last key", 3, 4, 2, 1, 257, 128, window_size=(0, 0)),
    Case("window_scale_negative", "a scale below 0", *_MORE_KEYS, window_size=(40, 25), softmax_scale=-0.5),
    Case("window_left", "unbounded to the right", *_SQUARE, window_size=(30, -1)),
    Case("window_right", "unbounded to the left", *_SQUARE, window_size=(-1, 30)),
    Case(
        "window_right_more_queries",
        "a diagonal 30 further right; rows without keys",
        *_MORE_QUERIES,
        window_size=(-1, 30),
    ),
    Case("window_left_more_keys", "whole key tiles before the band for every row", *_MORE_KEYS, window_size=(60, -1)),
    Case("window_causal", "causal overrides the right side", *_SQUARE, True, window_size=(50, 11)),
    Case("window_causal_more_keys", "sliding window over a longer past", *_MORE_KEYS, True, window_size=(64, -1)),
    Case(
        "window_causal_more_queries",
        "causal rows without keys, and a window",
        *_MORE_QUERIES,
        True,
        window_size=(33, 0),
    ),
    Case("window_wide", "wider than the keys: no mask at all", *_SQUARE, window_size=(1000, 1000)),
    Case("window_huge", "i + seqlen_k + window passes 31 bits", *_RAGGED, window_size=(2**31 - 1, 2**31 - 1)),
    Case("window_huge_64", "the same, past 32 bits", *_RAGGED, True, window_size=(2**40, -1)),
    Case("window_tile_edges", "the band's edges fall on tile edges", 1, 1, 1, 256, 256, 128, window_size=(64, 63)),
    Case("window_decode", "one query and the last 64 keys of 513", 2, 8, 2, 1, 513, 128, True, window_size=(63, 0)),
    Case("window_long", "few of many key tiles", 1, 1, 1, 513, 1025, 64, True, window_size=(100, 0)),
]

_SOFTCAPS = [
    Case(f"softcap_{cap:g}{'_causal' * causal}", f"scores capped at {cap}", *_RAGGED, causal, softcap=cap)
    for cap, causal in ((0.5, False), (0.5, True), (5.0, False), (30.0, True), (50.0, False))
] + [
    Case(
        "softcap_scores_40",
        "scores past the cap: gradients through tanh's tail",
        1,
        2,
        2,
        77,
        150,
        64,
        values="rising",
        softcap=15.0,
    ),
    Case(
        "softcap_scores_1e4",
        "tanh saturates: many keys share the maximum",
        1,
        2,
        2,
        33,
        150,
        64,
        True,
        values="scores_1e4",
        softcap=50.0,
    ),
    Case(
        "softcap_masked_rows", "rows without keys: the cap of -inf is no score", 1, 2, 2, 108, 61, 64, True, softcap=2.0
    ),
    Case("softcap_window", "capped within a band", *_SQUARE, window_size=(25, 12), softcap=5.0),
    Case("softcap_scale", "the cap comes after the scale", *_RAGGED, softmax_scale=0.5, softcap=8.0),
    Case("softcap_scale_negative", "a scale below 0", *_RAGGED, softmax_scale=-0.3, softcap=3.0),
    Case("softcap_scale_zero", "tanh(0) everywhere", *_RAGGED, softmax_scale=0.0, softcap=3.0),
]

_ALIBI = [
    Case("alibi", "slopes of the paper, one for each head", 2, 4, 4, 113, 203, 64, alibi="heads"),
    Case("alibi_causal", "the usual form", 2, 4, 4, 200, 200, 64, True, alibi="heads"),
    Case("alibi_more_queries", "distances from before the first key", 1, 4, 4, 203, 113, 64, alibi="heads"),
    Case("alibi_masked_rows", "rows without keys", 1, 4, 4, 203, 113, 64, True, alibi="heads"),
    Case(
        "alibi_batch_gqa",
        "slopes per sequence, grouped heads: the slope is the query head's",
        3,
        6,
        2,
        65,
        97,
        64,
        alibi="batch",
    ),
    Case("alibi_mqa", "all query heads share a key head, not a slope", 2, 6, 1, 65, 97, 64, True, alibi="batch"),
    Case("alibi_window", "a band", *_RAGGED, window_size=(31, 7), alibi="heads"),
    Case("alibi_softcap", "ALiBi is added after the cap", *_RAGGED, softcap=4.0, alibi="heads"),
    Case("alibi_scale_zero", "only the slopes weigh the keys", *_RAGGED, softmax_scale=0.0, alibi="heads"),
    Case(
        "alibi_scale_negative",
        "the sign of the scale does not reach the slope",
        *_RAGGED,
        softmax_scale=-0.3,
        alibi="heads",
    ),
    Case("alibi_decode", "one query", 2, 8, 2, 1, 257, 128, True, alibi="batch"),
    Case("alibi_long", "distances that pass 16 bits' integers", 1, 2, 2, 65, 2500, 64, True, alibi="heads"),
]

_DROPOUT = [
    Case("dropout", "neither length a multiple of a tile of random bits", *_RAGGED, dropout_p=0.1),
    Case("dropout_causal", "masked keys use no random numbers up", *_SQUARE, True, dropout_p=0.17),
    Case("dropout_masked_rows", "rows without keys", *_MORE_QUERIES, True, dropout_p=0.3),
    Case("dropout_window", "key tiles left out before the band", *_MORE_KEYS, window_size=(40, 25), dropout_p=0.2),
    Case("dropout_half", "p = 1/2", 2, 2, 2, 65, 65, 32, dropout_p=0.5),
    Case("dropout_most", "few keys are kept, scaled by 20; some rows keep none", 1, 2, 2, 65, 15, 64, dropout_p=0.95),
    Case("dropout_tiny", "below 2^-17: drops nothing, still scales", 1, 2, 2, 65, 65, 64, dropout_p=2.0**-18),
    Case("dropout_gqa", "the mask is the query head's", 2, 6, 2, 97, 65, 64, dropout_p=0.25),
    Case("dropout_decode", "one query", 3, 4, 4, 1, 257, 128, dropout_p=0.4),
    Case("dropout_one_key", "a row is kept or dropped whole", 2, 2, 2, 129, 1, 64, dropout_p=0.5),
    Case(
        "dropout_values_negative",
        "lse of -1000: probabilities come back from it in the backward",
        1,
        2,
        2,
        77,
        150,
        64,
        values="negative",
        dropout_p=0.2,
    ),
    Case("dropout_no_keys", "nothing to drop", 1, 2, 2, 33, 0, 64, dropout_p=0.2),
    Case("dropout_long", "many tiles of keys", 1, 1, 1, 130, 1025, 64, True, dropout_p=0.1),
]

_TOGETHER = [
    Case(
        "together",
        "window, ALiBi and dropout with causal and grouped heads",
        2,
        4,
        2,
        203,
        300,
        64,
        True,
        window_size=(70, 0),
        alibi="batch",
        dropout_p=0.15,
    ),
    Case(
        "together_softcap",
        "window, softcap and ALiBi",
        2,
        4,
        2,
        203,
        150,
        64,
        window_size=(40, 20),
        softcap=6.0,
        alibi="batch",
    ),
    Case(
        "together_odd_head_dim",
        "the same, padded head dim",
        1,
        4,
        2,
        90,
        70,
        33,
        True,
        window_size=(25, 3),
        softcap=6.0,
        alibi="heads",
    ),
    Case(
        "together_layout",
        "strided inputs",
        2,
        4,
        2,
        77,
        77,
        64,
        True,
        layout="packed",
        window_size=(30, 5),
        alibi="heads",
        dropout_p=0.2,
    ),
    Case(
        "together_misaligned",
        "inputs that are copied first",
        2,
        4,
        4,
        77,
        90,
        72,
        layout="misaligned",
        window_size=(30, 5),
        alibi="heads",
        dropout_p=0.2,
    ),
] + [
    Case(
        f"together_{d}_{name}",
        f"head dim {d}",
        1,
        4,
        2,
        150,
        170,
        d,
        causal,
        window_size=(64, 16),
        alibi="heads",
        **one,
    )
    for d in (32, 40, 64, 96, 128, 192, 256)
    for name, causal, one in (("softcap", True, {"softcap": 10.0}), ("dropout", False, {"dropout_p": 0.1}))
]

FEATURE_CASES: list[Case] = [*_WINDOWS, *_SOFTCAPS, *_ALIBI, *_DROPOUT, *_TOGETHER]
SMALL_FEATURE_CASES: list[Case] = [
    c for c in FEATURE_CASES if c.batch * c.nheads <= 12 and c.seqlen_q <= 160 and c.seqlen_k <= 170
]
