"""The internals of rmm_linear that the measurements need: where the library moves them, only this file follows."""

from __future__ import annotations

import functools

from rmm_linear import packing
from rmm_linear._support import provenance, tables
from rmm_linear._support.files import write_text
from rmm_linear._support.installing import INSTALL_EXTRA
from rmm_linear._support.quiet import quiet
from rmm_linear._support.sizes import read_bytes
from rmm_linear.backends.triton import kernels
from rmm_linear.config import OPERATIONS, QUALITIES, RMMConfig
from rmm_linear.context.learned import STEPS as LEARNING_STEPS
from rmm_linear.context.model_context import ModelContext
from rmm_linear.context.sketch_cache import CacheEntry, SketchCache
from rmm_linear.conversion.exact import converted_modules, exact_but, set_aside
from rmm_linear.conversion.explain import explain
from rmm_linear.fitting import times
from rmm_linear.fitting.fit import fit
from rmm_linear.fitting.fitting import Fitting
from rmm_linear.fitting.longest import max_length
from rmm_linear.fitting.options import ALLOW
from rmm_linear.fitting.report import FitReport
from rmm_linear.fitting.settings import SETTINGS, Conversions, Setting
from rmm_linear.fitting.static_memory import static_memory
from rmm_linear.memory.ledger import storage_key
from rmm_linear.memory.peak import LiveTensors, Peak
from rmm_linear.ops.attention import attention_backward, pack_attention
from rmm_linear.ops.derivatives import activate_and_pack, apply_derivative, pack_derivative
from rmm_linear.ops.gated import apply_gated, gate_and_pack, keep_gated
from rmm_linear.ops.masks import APPLY_MASK, PACK_MASK, apply_mask, pack_mask
from rmm_linear.ops.norms import norm_backward, normalize_and_pack, pack_norm
from rmm_linear.ops.sketches import PACK, PACKED_SKETCH, SKETCH, UNPACK
from rmm_linear.packing import GROUP
from rmm_linear.packing.attention import AttentionSpec
from rmm_linear.planning.blocks.find import find_blocks
from rmm_linear.planning.blocks.plan import (
    CONVERT,
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    SELECTIVE,
    TILE,
    BlockPlan,
    PlannedBlock,
    label_of,
)
from rmm_linear.planning.blocks.solve import Option, choose, least, peak_of
from rmm_linear.planning.chains import schedules
from rmm_linear.planning.chains.cells import adapted
from rmm_linear.planning.graphs.capture import capture
from rmm_linear.planning.graphs.pieces import graph_step
from rmm_linear.planning.step.divided import divided
from rmm_linear.planning.step.shards import Shards
from rmm_linear.planning.step.step import copied, run_step
from rmm_linear.planning.step.watch import watch
from rmm_linear.planning.step.workspace import Workspace, allocations, allocator_peak
from rmm_linear.planning.tiles.tile import Tile
from rmm_linear.sketches import KINDS, SAMPLERS, TokenMask, kept_rows, probabilities, row_norms, sketch
from rmm_linear.sketches.blocks import block_rows
from rmm_linear.sketches.rows import sample
from rmm_linear.sketches.seeds import draw_seed, mix, peek_seed
from rmm_linear.spec import SaveSpec
from rmm_linear.variance.__main__ import add_arguments, count, print_survey
from rmm_linear.variance.passes import Passes, measuring
from rmm_linear.variance.standins.attention import AttentionNoise, simulate_attention
from rmm_linear.variance.survey.batches import make_batches
from rmm_linear.variance.survey.records import LayerRecord, record_layers
from rmm_linear.variance.survey.survey import medians

table = functools.partial(tables.table, width=10**6)  # tables of pages scroll
