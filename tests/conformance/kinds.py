"""What each kind of server offers, and why not where it does not: the one table that the suite skips by and the manual prints."""

from __future__ import annotations

import msgspec
import pytest
from slipstream.configs.engines import Fake, Servers, Sglang, Transformers, Vllm

OFFERS = {
    "exact": "tokens and log-probs of transformers, within 1e-4 nats in float32 (vLLM on a GPU: 0.02)",
    "truncated": "with `top_p` or `top_k`, log-probs of the truncated distribution",
    "seed": "a seed per request: equal seed, equal tokens",
    "stop": "only the stop tokens that a request names stop it",
    "abort": "an aborted request returns its tokens and goes on exactly",
    "spans": "exact version spans of requests that a push finds under way",
    "recompute": "partial rollout `recompute`",
    "keep_kv": "partial rollout `keep_kv`, declared as mixed",
    "abort_resume": "partial rollout `abort_resume`",
    "prefix cache": "a prefix cache, never of another version",
    "staging": "receives weights while it generates",
    "broadcast": "transport `broadcast`",
    "shared": "transport `shared`",
    "disk": "transport `disk`",
    "delta": "transport `delta`",
    "fp8": "weights in fp8 (`rollout.engine.options: {quantization: fp8}`; vLLM on GPUs only)",
    "untied": "untied embeddings",
    "moe": "mixture of experts",
    "tensor parallel": "a replica over several processes",
    "compute process": "a process of its own computes; its death is reported at once",
    "images": "images in prompts, at the tokens that a request names ([images](images.md))",
    "cancel": "the request of a caller that leaves ends",
    "sleep": "sleeps until the next push, and loses no token (`launch.kind: colocated`)",
}
"""What the suite tests, in the words of the manual."""

_SGLANG_SEED = "SGLang uses a request's seed only in its deterministic mode, which has no CPU backend"
_OURS_ON_ONE_DEVICE = "our own server holds the model in one process; larger models need vLLM or SGLang"
_OURS_IN_ONE_PROCESS = "server and model are one process"
_PUSHED_AS_THEY_ARE = "how it loads fp8 a second time is not known: no GPU was there to try it"
_SGLANG_IMAGES = (
    "SGLang takes every placeholder among the token ids for an image, sampled ones, too ([images](images.md#servers))"
)
_VLLM_SLEEPS = (
    "refused on a CPU, where its sleep frees no memory; on a GPU a colocated run freed it in each step and went on, "
    "but the suite failed there by a tolerance that has been changed since, and was not run again ([gpu](gpu.md))"
)
_SGLANG_SLEEPS = "refused on a CPU, where its sleep frees no memory; not run on a GPU yet ([gpu](gpu.md))"
_FP8_ON_GPUS = (
    "only GPUs have its kernels for fp8; there 7 of the suite's 14 tests of it passed before a time limit ended them, "
    "and the others were not run yet ([gpu](gpu.md))"
)


class Kind(msgspec.Struct, frozen=True):
    """One kind of engine.

    Attributes:
        name: `rollout.engine.kind`.
        engine: its section of the configuration.
        lacks: offer -> why this kind does not have it.
        expected: offer -> why the suite has not seen it, or not all of it, yet; the manual says `expected` and no more.
    """

    name: str
    engine: type[Servers]
    lacks: dict[str, str] = {}
    expected: dict[str, str] = {}

    def needs(self, *offers: str) -> None:
        """Skip the test, with the reason from the table, where this kind lacks one of `offers`."""
        for offer in offers:
            assert offer in OFFERS, f"{offer!r} is not in the table of offers"
            if offer in self.lacks:
                pytest.skip(f"{self.name} has no {offer!r}: {self.lacks[offer]}")


KINDS = (
    Kind("vllm", Vllm, expected={"fp8": _FP8_ON_GPUS, "sleep": _VLLM_SLEEPS}),
    Kind(
        "sglang",
        Sglang,
        {"seed": _SGLANG_SEED, "fp8": _PUSHED_AS_THEY_ARE, "sleep": _SGLANG_SLEEPS, "images": _SGLANG_IMAGES},
        expected={"sleep": _SGLANG_SLEEPS},  # on a CPU the suite skips it
    ),
    Kind(
        "transformers",
        Transformers,
        {"tensor parallel": _OURS_ON_ONE_DEVICE, "compute process": _OURS_IN_ONE_PROCESS},
    ),
    Kind(
        "fake",
        Fake,
        {
            "images": "it is for fault injection",
            "tensor parallel": _OURS_ON_ONE_DEVICE,
            "compute process": _OURS_IN_ONE_PROCESS,
        },
    ),
)


def table() -> str:
    """The table in Markdown: one row per offer, one column per kind, the reasons below."""
    assert all(offer in OFFERS for kind in KINDS for offer in (*kind.lacks, *kind.expected))
    reasons = list(dict.fromkeys(reason for kind in KINDS for reason in (kind.lacks | kind.expected).values()))
    rows = [["", *(f"`{kind.name}`" for kind in KINDS)], ["---"] * (len(KINDS) + 1)]
    for offer, words in OFFERS.items():
        rows.append([words, *(_mark(kind, offer, reasons) for kind in KINDS)])
    notes = [f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, 1)]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", *notes])


def _mark(kind: Kind, offer: str, reasons: list[str]) -> str:
    for mark, found in (("expected", kind.expected), ("no", kind.lacks)):
        if offer in found:
            return f"{mark} ({reasons.index(found[offer]) + 1})"
    return "yes"
