# SPDX-License-Identifier: Apache-2.0
"""What treeverify has on other releases of SGLang and not on this one: what SGLang's refusal of a name adds."""

from __future__ import annotations


def why(algorithm: str) -> str:
    """What follows "Unknown speculative algorithm name: DDTREE"; nothing for names that are not ours."""
    if algorithm != "DDTREE":
        return ""
    return (
        ". treeverify: no DDTREE on SGLang v0.5.23 yet; draft a chain (--speculative-algorithm DFLASH) or serve "
        "SGLang v0.5.12.post1 (apply.py --pin v0.5.12.post1)"
    )
