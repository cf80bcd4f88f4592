# SPDX-License-Identifier: Apache-2.0
"""treeverify: draft-tree verification for MLA models inside SGLang, and DDTREE, which drafts such trees.

The patches of this pin call into `attention.flashinfer_mla` and `attention.triton_mla` (metadata and forward of a
verify step, both by `attention.verifier`), `attention.graph` (what the CUDA graph runner hands over),
`attention.triton_draft` (draft steps of an MLA drafter with topk > 1), `ddtree.algorithm` (the speculative algorithm
DDTREE) and `ddtree.metrics` (what it reports). `kv` moves rows of KV pools. `gates` decides where treeverify serves.
`python -m sglang.srt.treeverify.selftest` checks the kernels on this machine.
"""
