"""Random numbers in registers: Philox 4x32-10 under one seed, split into streams.

The alphabet of all kernels: ``i_`` index, ``o_`` offsets, ``p_`` pointers, ``b_`` block in registers, ``m_`` mask.
"""

import triton
import triton.language as tl


@triton.jit
def as_int64(number):
    """An int64 scalar, whether the number is a loop's, an argument's or a constant 1 that was specialised."""
    return tl.full([], 0, tl.int64) + number


@triton.jit
def known_seed(p_seed, number, n_fresh):
    """A seed, int64 scalar: a number, which is written to n_fresh places from p_seed on; what is there if that is 0.

    Not a constant: a graph that is captured needs the kernel that eager code has compiled.
    """
    seed = seed_again(p_seed, number, n_fresh)
    for i in tl.static_range(2):
        tl.store(p_seed + i, seed, mask=(i < n_fresh) & (tl.program_id(0) == 0))
    return seed


@triton.jit
def seed_again(p_seed, number, n_fresh):
    """The same, written before: for every tile, where one that stays takes registers that a kernel needs."""
    return tl.load(p_seed, mask=n_fresh == 0, other=as_int64(number))


@triton.jit
def words(seed, counter, STREAM: tl.constexpr):
    """Four uint32 words per counter.

    seed: int64 scalar. counter: non-negative int64, any shape.
    """
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    stream = (counter * 0 + STREAM).to(tl.uint32)
    return tl.philox(seed, low, high, stream, stream * 0)


@triton.jit
def signs(seed, o_i):
    """+1 or −1 for every index, float32: bit i % 32 of the first word of counter i // 32, in stream 0.

    o_i: int64, any shape.
    """
    word, _, _, _ = words(seed, o_i // 32, 0)
    return 1.0 - 2.0 * ((word >> (o_i % 32).to(tl.uint32)) & 1).to(tl.float32)


@triton.jit
def uniform(word):
    """Uniform float32 in [0, 1) from uint32 words."""
    signed = word.to(tl.int32, bitcast=True)
    return tl.where(signed < 0, -signed - 1, signed).to(tl.float32) * 4.6566127342e-10


@triton.jit
def normals(first, second):
    """Two standard normal float32 numbers from two uint32 words, by Box and Muller."""
    radius = tl.sqrt(-2.0 * tl.log(tl.maximum(uniform(first), 1.0e-7)))
    angle = 6.283185307179586 * uniform(second)
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def parity(b_bits):
    """Parity of the set bits of non-negative int64 numbers: 0 or 1."""
    b_bits = b_bits ^ (b_bits >> 32)
    b_bits = b_bits ^ (b_bits >> 16)
    b_bits = b_bits ^ (b_bits >> 8)
    b_bits = b_bits ^ (b_bits >> 4)
    b_bits = b_bits ^ (b_bits >> 2)
    b_bits = b_bits ^ (b_bits >> 1)
    return b_bits & 1
