# SPDX-License-Identifier: Apache-2.0
"""treeverify: draft-tree verification for MLA models inside SGLang.

The patches of this pin call into `attention.flashinfer_mla` (metadata and forward of a verify step), `attention.graph`
(what the CUDA graph runner hands over) and `attention.triton_draft` (draft steps of an MLA drafter with topk > 1).
`gates` decides where treeverify serves. `python -m sglang.srt.treeverify.selftest` checks the kernels on this machine.
"""
