"""Saved programs (`.pt2`), opened without reading their weights."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.export import ExportedProgram
from torch.export.pt2_archive import _package
from torch.export.pt2_archive.constants import WEIGHTS_DIR

from gpuir.ir.errors import ModelError


def open_program(path: str | Path) -> ExportedProgram:
    """The exported program that torch.export.save wrote. Its weights have a shape and a dtype
    alone: they lie on the meta device, and their bytes stay on disk. ModelError when the file is
    no such archive.

    torch.export.load reads every weight; the one function of it that makes tensors of the
    archive's records is replaced meanwhile.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelError("cannot read the file", where=str(path), found="no such file")
    read = _package._build_file_map

    def shapes_alone(reader: Any, config: Any, folder: str) -> dict[str, torch.Tensor]:
        if folder != WEIGHTS_DIR:
            return read(reader, config, folder)
        found: dict[str, torch.Tensor] = {}
        for payload in config.config.values():
            if not payload.use_pickle:
                dtype = _package.deserialize_scalar_type(payload.tensor_meta.dtype)
                size = reader.archive_file.get_record_size(f"{folder}{payload.path_name}")
                found[payload.path_name] = torch.empty(
                    size // dtype.itemsize, dtype=dtype, device="meta"
                )
        return found

    log = logging.getLogger("torch.export")
    level = log.level
    try:
        log.setLevel(logging.CRITICAL)  # it warns before it raises
        with patch.object(_package, "_build_file_map", shapes_alone), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    except Exception as error:
        raise ModelError(
            "not a program that torch.export.save wrote, or another version's",
            where=str(path),
            expected=f"a .pt2 archive that torch {torch.__version__} loads",
            found=f"{type(error).__name__}: {error}".splitlines()[0][:300],
            fix="export and save it again: torch.export.save(torch.export.export(...), path)",
        ) from error
    finally:
        log.setLevel(level)
