# SPDX-License-Identifier: Apache-2.0
"""Server arguments of releases that keep them in one dataclass, and complete them in place."""

from __future__ import annotations

import dataclasses
from typing import Any


def server_args(values: dict[str, Any]) -> Any:
    """ServerArgs with its defaults and `values`, without the checks of its __post_init__, which want a model."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    args = object.__new__(ServerArgs)
    for field in dataclasses.fields(ServerArgs):
        if field.default is not dataclasses.MISSING:
            setattr(args, field.name, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            setattr(args, field.name, field.default_factory())
    for name, value in values.items():
        setattr(args, name, value)
    set_global_server_args_for_scheduler(args)
    args.use_mla_backend = True  # ModelRunner sets this
    return args
