# SPDX-License-Identifier: Apache-2.0
"""treeverify: draft-tree verification for MLA models inside SGLang, and DDTREE, which drafts such trees.

The patches of v0.5.12.post1 call into `attention.flashinfer_mla` and `attention.triton_mla` (metadata and forward of a
verify step) and `attention.graph` (what the CUDA graph runner hands over), those of later releases into
`attention.choice` (whether a runner gets a backend of `attention.backends`); both come down to `attention.verifier`.
Up to v0.5.17 they call `attention.triton_draft` (draft steps of an MLA drafter with topk > 1) and, where there is
DDTREE, `ddtree.algorithm` (the speculative algorithm) and `ddtree.metrics` (what it reports). `kv` moves rows of KV
pools. `gates` decides where treeverify serves, `compat` knows what releases have in different places.
`python -m sglang.srt.treeverify.selftest` checks the kernels on this machine.
"""
