# SPDX-License-Identifier: Apache-2.0
"""Each rule finds what it is for, and leaves alone what looks like it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest
from capture.findings import Finding
from capture.rules import RULES

HEAD = """\
import ctypes
import logging

import numpy as np
import torch

logger = logging.getLogger(__name__)


def step(t: torch.Tensor, i: torch.Tensor, lens_cpu: torch.Tensor, reqs: list, n: int, pool, wrapper):
"""

BAD = {
    "host-read": [
        "t.item()",
        "t.sum().tolist()",
        "t.cpu()",
        "t.cpu().numpy()",
        'x = t.to("cpu")',
        'x = t.to(device="cpu", dtype=torch.int32)',
        'x = t.to(torch.device("cpu"))',
        "int(t[0])",
        "float(t.max())",
        "bool(t.any())",
        "max(t, i)",
        "x = max([t, i])",
        "any(x > 0 for x in (t, i))",
        "x = sum([t, i])\nx.item()",
        "torch.equal(t, i)",
        "np.asarray(t)",
        "lens_cpu.copy_(t)",
        "pool.lengths.item()",
        "k, v = t.split(2)\nk.item()",
        "for x in [t]:\n    x.item()",
        "f = [x.item() for x in (t, i)]",
        "with torch.no_grad():\n    t.item()",
        "try:\n    t.item()\nfinally:\n    pass",
        "a = lambda: t.item()",
        "torch.Tensor.item(t)",
    ],
    "synchronize": [
        "torch.cuda.synchronize()",
        "torch.cuda.current_stream().synchronize()",
        "pool.device_module.synchronize()",
        "event = torch.cuda.Event()\nevent.synchronize()",
        "torch.cuda.empty_cache()",
        "from torch.cuda import synchronize as wait\nwait()",
    ],
    "branch": [
        "if t.any():\n    n = 1",
        "if (t > 0).all():\n    n = 1",
        "while t[0] > 0:\n    t = t - 1",
        "x = 1 if t.sum() else 2",
        "assert t[0] == 0",
        "x = n and t.any() and n",
        "if not t[0]:\n    n = 1",
        "x = [r for r in reqs if t[0]]",
        "x = 3 in t",
        "match n:\n    case 1 if t.any():\n        n = 2",
    ],
    "nonzero": [
        "t.nonzero()",
        "torch.nonzero(t)",
        "torch.where(t > 0)",
        "torch.masked_select(t, t > 0)",
        "torch.unique(t)",
        "t.argwhere()",
    ],
    "mask-index": [
        "x = t[t > 0]",
        "m = (t > 0) & (t < 5)\nx = i[~m]",
        "m = torch.zeros(3, dtype=torch.bool, device=t.device)\nx = t[m]",
        "m = i.to(torch.bool)\nx = t[m, 0]",
        "t[t > 0] = i",
    ],
    "size": [
        "x = torch.empty(t[-1], dtype=torch.int64, device=t.device)",
        "x = torch.zeros((t.sum(), 4), device=t.device)",
        "x = torch.arange(t.max(), device=t.device)",
        "x = i[: t[0]]",
        "for k in range(t[0]):\n    n = k",
        "x = torch.repeat_interleave(t, i)",
        "x = reqs[t[0]]",
        "x = t.view(t[0], -1)",
    ],
    "upload": [
        "x = torch.tensor(reqs, device=t.device)",
        "x = torch.tensor(reqs).to(t.device)",
        "x = torch.tensor(reqs).cuda()",
        "x = torch.from_numpy(np.zeros(3)).to('cuda')",
        "x = torch.tensor(reqs).to(t.device, non_blocking=True)",
        "t.copy_(lens_cpu)",
        "x = t[[0, 1]]",
        "x = t[lens_cpu]",
        "x = t.new_tensor(reqs)",
        "with torch.device('cuda'):\n    x = torch.tensor(reqs)",
    ],
    "cat": ["x = torch.cat([t, i])", "x = torch.stack([t, i], dim=1)", "x = torch.hstack((t, i))"],
    "alloc": [
        "x = torch.empty(3, device=t.device)",
        "x = torch.zeros_like(t)",
        "x = t.new_empty(3)",
        "x = t.clone()",
        "with torch.device('cuda'):\n    x = torch.arange(n)",
    ],
    "raw-alloc": [
        "ctypes.CDLL('libcudart.so').cudaMalloc(n)",
        "x = torch.cuda.caching_allocator_alloc(n)",
    ],
    "pool-cast": [
        "x = pool.get_key_buffer(0).to(t.dtype)",
        "k = pool.get_value_buffer(0)\nx = k.float()",
        "x = pool.get_key_buffer(0).contiguous()",
    ],
    "plan": ["wrapper.plan(t, i)", "wrapper.begin_forward(t, i)"],
    "loop": [
        "for r in reqs:\n    torch.add(t, 1, out=t)",
        "for k in lens_cpu.tolist():\n    x = t + torch.ones(k, device=t.device)",
        "x = [torch.mul(t, r) for r in reqs]",
        "for k in range(n):\n    t.add_(1)",
    ],
    "format": [
        "print(t)",
        'x = f"lengths: {t}"',
        'logger.info("lengths %s", t)',
        "x = str(t)",
        'x = "lengths %s" % t',
        'x = "%d: %s" % (n, t)',
        'x = "{}".format(t)',
    ],
}
GOOD = {
    "host-read": [
        "lens_cpu.item()",
        "lens_cpu.tolist()",
        "x = torch.tensor(reqs).tolist()",
        "int(t.shape[0])",
        "int(t.numel())",
        "x = t.cpu",
        "max(n, t.shape[0])",
        "x = sum([t, i])",
        "if n:\n    x = t\nelse:\n    n = t.item()\n    raise ValueError(n)",
        'x = t.to("cpu", non_blocking=True)',
        "t.copy_(i)",
        "x = t.to(torch.int32)",
        "if n > 9:\n    print(t.item())\n    raise ValueError(f'{t}')",
    ],
    "synchronize": ["event = torch.cuda.Event()\nevent.record()", "torch.cuda.current_stream().wait_stream(n)"],
    "branch": [
        "if t is None:\n    n = 1",
        "if t.shape[0] > 1:\n    n = 1",
        "if lens_cpu.any():\n    n = 1",
        "if t.numel() and t.is_contiguous():\n    n = 1",
        "x = torch.where(t > 0, t, i)",
        "if t.dtype == torch.int32:\n    n = 1",
        "assert t.device.type == 'cuda'",
        "if isinstance(t, torch.Tensor):\n    n = 1",
        "x = n in reqs and 3 in t.shape and 3 not in lens_cpu",
        "match n:\n    case 1 if t.shape[0]:\n        n = 2",
    ],
    "nonzero": ["x = torch.where(t > 0, t, 0)", "lens_cpu.nonzero()", "x = torch.sort(t)"],
    "mask-index": [
        "x = t[i]",
        "t[t > 0] = 0",
        "x = t.masked_fill(t > 0, 0)",
        "x = t[:, None]",
        "x = lens_cpu[lens_cpu > 0]",
    ],
    "size": [
        "x = torch.empty(n, device=t.device)",
        "x = i[:n]",
        "x = i[: t.shape[0]]",
        "x = torch.repeat_interleave(t, i, output_size=n)",
        "x = torch.repeat_interleave(t, n, dim=0)",
        "x = torch.full((n,), t[0], device=t.device)",
        "x = torch.zeros(int(lens_cpu[0]), device=t.device)",
    ],
    "upload": [
        "x = torch.tensor(reqs)",
        "x = torch.tensor(reqs, device='cpu')",
        "x = torch.tensor(reqs).pin_memory().to(t.device, non_blocking=True)",
        "x = torch.tensor(reqs, pin_memory=True).to(t.device, non_blocking=True)",
        "x = t.to(i.device)",
        "x = torch.as_tensor(t)",
        "x = t[0, 1]",
        "t.fill_(n)",
        "lens_cpu.copy_(torch.tensor(reqs))",
    ],
    "cat": ["x = t.view(-1)", "t[:n].copy_(i)", "x = torch.split(t, 2)"],
    "alloc": [
        "x = t[:n]",
        "torch.add(t, i, out=t)",
        "x = torch.empty(3)",
        "x = torch.zeros(3, device='cpu')",
        "t.zero_()",
    ],
    "raw-alloc": ["x = torch.cuda.current_stream()"],
    "pool-cast": [
        "x = pool.get_key_buffer(0).view(-1, 576)",
        "x = pool.get_key_buffer(0)[i].to(t.dtype)",
        "x = t.to(i.dtype)",
    ],
    "plan": ["wrapper.run(t)", "x = wrapper.plans"],
    "loop": [
        "for r in reqs:\n    r.done = True",
        "for k in (1, 2):\n    t.add_(k)",
        "for k in range(3):\n    t.add_(k)",
        "for r in reqs:\n    x = torch.zeros(3)",
    ],
    "format": [
        "print(n)",
        'x = f"{t.shape} {n}"',
        'logger.info("%s of %d", t.dtype, n)',
        'x = f"{t=}" if t is None else ""',
        'x = "%d: %s" % (n, t.shape)',
        'x = "{} {}".format(n, t.dtype)',
    ],
}


def module(body: str) -> dict[str, str]:
    return {"srt/m.py": HEAD + textwrap.indent(body, "    ") + "\n"}


def cases(examples: dict[str, list[str]]) -> list[object]:
    pairs = [(rule, i, body) for rule, some in examples.items() for i, body in enumerate(some)]
    return [pytest.param(rule, body, id=f"{rule}-{i}") for rule, i, body in pairs]


def test_every_rule_has_examples() -> None:
    assert list(BAD) == list(GOOD) == list(RULES)


@pytest.mark.parametrize(("rule", "body"), cases(BAD))
def test_found(lint: Callable[..., list[Finding]], rule: str, body: str) -> None:
    found = lint(module(body))
    assert rule in {one.rule for one in found}, found
    lines = len(HEAD.splitlines())
    assert all(lines < one.line <= lines + len(body.splitlines()) for one in found)


@pytest.mark.parametrize(("rule", "body"), cases(GOOD))
def test_left_alone(lint: Callable[..., list[Finding]], rule: str, body: str) -> None:
    assert rule not in {one.rule for one in lint(module(body))}
