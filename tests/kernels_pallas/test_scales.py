"""Keys, values or both of eight bits, a scale per row: every operation computes with the rows that they stand for."""

import functools

import jax
import numpy as np
import pytest

from tests.kernels_pallas.targets import run_of
from tests.kernels_pallas.test_scales_kernels import OPERATIONS, case

INT8 = ("int8", "int8")


@pytest.mark.parametrize(
    ("operation", "dtypes"),
    [*((operation, INT8) for operation in OPERATIONS), ("cache_attention", ("float32", "float8_e4m3fn"))],
)
def test_rows_of_eight_bits_are_those_that_they_stand_for(operation, dtypes):
    given, options = case(operation, 3, "float32", dtypes)
    run = run_of(operation, "reference")
    found = jax.jit(functools.partial(run, **options))(*given)
    for place, name in enumerate(["value_scale"] if operation == "caote_topk" else ["key_scale", "value_scale"], 1):
        if (scale := options[name]) is not None:
            given[place], options[name] = np.nan_to_num(np.float32(given[place]) * scale[..., None]), None
    expected = jax.jit(functools.partial(run, **options))(*given)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), found, expected)
