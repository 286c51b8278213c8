"""The text of the CUDA kernels. ``T`` is the arrays' type; a thread reads 16 bytes of them at a time (``W`` values).

What belongs to the model is a constant of the kernel; how many rows there are it is told at each call, since a kernel
is built anew for every set of constants, and batches have many lengths. All arithmetic is in float32, rounded once at
the end, as the matrix products beside them do it. Nothing is included: headers take longer to read than the rest.
"""

from __future__ import annotations

# Half precision: what needs instructions of the GPU's own.
NUMBERS = r"""
typedef unsigned int uint32;

struct float16 {
  unsigned short bits;
  float16() = default;
  __device__ __forceinline__ explicit float16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ __forceinline__ operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};

struct bfloat16 {
  unsigned short bits;
  bfloat16() = default;
  __device__ __forceinline__ explicit bfloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ __forceinline__ operator float() const { return __uint_as_float((uint32)bits << 16); }
};

// Two values in one word, the first in its lower half; half the conversions.
__device__ __forceinline__ uint32 pair(float first, float second, bfloat16) {
  uint32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}

__device__ __forceinline__ uint32 pair(float first, float second, float16) {
  uint32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}

// to (16, 8) += left (16, 8) @ right (8, 8) by a warp. Thread i holds columns 2 (i % 4) and the next of rows i / 4 and
// i / 4 + 8 of the first two, and rows 2 (i % 4) and the next of column i / 4 of the third.
__device__ __forceinline__ void add_product(float (&to)[4], const uint32 (&left)[2], uint32 right, bfloat16) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
      : "r"(left[0]), "r"(left[1]), "r"(right));
}

__device__ __forceinline__ void add_product(float (&to)[4], const uint32 (&left)[2], uint32 right, float16) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
      : "r"(left[0]), "r"(left[1]), "r"(right));
}
"""

HEADER = r"""
#define INFINITY __int_as_float(0x7f800000)

typedef float float32;

template <typename U>
struct alignas(16) Vec {
  static constexpr int W = 16 / sizeof(U);
  U v[W];
};

// An array may be a view of another one, which begins anywhere; then values are read and written one by one.
template <typename Block, typename U>
__device__ __forceinline__ Block read(const U* p) {
  if (reinterpret_cast<size_t>(p) % sizeof(Block) == 0) return *reinterpret_cast<const Block*>(p);
  Block x;
  #pragma unroll
  for (int k = 0; k < sizeof(Block) / sizeof(U); k++) x.v[k] = p[k];
  return x;
}

template <typename U>
__device__ __forceinline__ Vec<U> load(const U* p, size_t i) {
  return read<Vec<U>>(p + i * Vec<U>::W);
}

template <typename U>
__device__ __forceinline__ void store(U* p, size_t i, const Vec<U>& x) {
  p += i * Vec<U>::W;
  if (reinterpret_cast<size_t>(p) % sizeof(Vec<U>) == 0) {
    *reinterpret_cast<Vec<U>*>(p) = x;
    return;
  }
  #pragma unroll
  for (int k = 0; k < Vec<U>::W; k++) p[k] = x.v[k];
}

template <typename U>
struct alignas(4 * sizeof(U)) Quad {
  U v[4];
};

template <typename U>
__device__ __forceinline__ Quad<U> quad(const U* p, size_t i) {
  return read<Quad<U>>(p + i * 4);
}

__device__ __forceinline__ float logistic(float x) {
  return __fdividef(1.f, 1.f + __expf(-x));
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
"""

# w: (N, K / 8) uint32 of 4 bits each; s, b: (N, K / GROUP); out: (N, K). A thread makes four words, one of each quarter
# of what its block makes, so that neighbours read and write neighbouring words.
DEQUANTIZE = r"""
extern "C" __global__ void NAME(const uint32* w, const T* s, const T* b, T* out, int count) {
  constexpr int WORDS = GROUP / 8;
  size_t first = (size_t)blockIdx.x * 1024 + threadIdx.x;
  uint32 word[4];
  float scale[4], bias[4];
  #pragma unroll
  for (int k = 0; k < 4; k++) {
    size_t i = first + k * 256;
    if (i < count) {
      word[k] = w[i];
      scale[k] = static_cast<float>(s[i / WORDS]);
      bias[k] = static_cast<float>(b[i / WORDS]);
    }
  }
  #pragma unroll
  for (int k = 0; k < 4; k++) {
    size_t i = first + k * 256;
    if (i < count) {
      float values[8];
      // 2^23 with the four bits as its last ones, less 2^23: conversions of integers are slower than the memory.
      #pragma unroll
      for (int j = 0; j < 8; j++)
        values[j] = fmaf(__uint_as_float(0x4B000000u | ((word[k] >> (4 * j)) & 15u)) - 8388608.f, scale[k], bias[k]);
      // Written past the cache, which the matrix product that reads it needs for its input.
      uint4 packed = make_uint4(
          pair(values[0], values[1], T()), pair(values[2], values[3], T()), pair(values[4], values[5], T()),
          pair(values[6], values[7], T()));
      __stcs(reinterpret_cast<uint4*>(out) + i, packed);
    }
  }
}
"""

# table: (V, D); ids: (N,), negative ones counting from the end; out: (N, D).
TAKE_ROWS = r"""
extern "C" __global__ void NAME(const T* table, const int* ids, T* out, int count, int size) {
  constexpr int PARTS = D / Vec<T>::W;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)count * PARTS) return;
  int id = ids[i / PARTS];
  store<T>(out, i, load<T>(table, (size_t)(id < 0 ? id + size : id) * PARTS + i % PARTS));
}
"""

# g: (N, D); places, targets: (N,), of which a negative target has no row; out: (M, D). No place twice.
PUT_ROWS = r"""
extern "C" __global__ void NAME(const T* g, const int* places, const int* targets, T* out, int count) {
  constexpr int PARTS = D / Vec<T>::W;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)count * PARTS || targets[i / PARTS] < 0) return;
  store<T>(out, (size_t)places[i / PARTS] * PARTS + i % PARTS, load<T>(g, i));
}
"""

# x, out: (count,), whole vectors of them; factor: (1,) float32.
SCALE_BY = r"""
extern "C" __global__ void NAME(const T* x, const float* factor, T* out, int count) {
  constexpr int W = Vec<T>::W;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count / W) return;
  Vec<T> v = load<T>(x, i);
  #pragma unroll
  for (int j = 0; j < W; j++) v.v[j] = static_cast<T>(static_cast<float>(v.v[j]) * *factor);
  store<T>(out, i, v);
}
"""

# x: any number of float32 values; index: (N,); out: (N,) SCALE times those.
SPREAD = r"""
extern "C" __global__ void NAME(const float* x, const int* index, T* out, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = static_cast<T>(SCALE * x[index[i]]);
}
"""

# The same from T to float32.
COLLECT = r"""
extern "C" __global__ void NAME(const T* x, const int* index, float* out, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = SCALE * static_cast<float>(x[index[i]]);
}
"""

# ids: (N,), none negative; order: (N,) places of the ids in order, equal ones as they come; g: (N, D); out: (V, D)
# sums of the rows of each id, added in float32 from the first to the last, by the block at the first place of an id.
ADD_ROWS = r"""
extern "C" __global__ void NAME(
    const int* ids, const uint32* order, const T* g, const T* onto, T* out, int count) {
  if (ONTO) out = const_cast<T*>(onto);
  constexpr int W = Vec<T>::W, PARTS = D / W, CHUNKS = (PARTS + THREADS - 1) / THREADS, AHEAD = 4;
  const int place = blockIdx.x / CHUNKS, part = (blockIdx.x % CHUNKS) * THREADS + threadIdx.x;
  const int id = ids[order[place]];
  if (part >= PARTS || (place > 0 && ids[order[place - 1]] == id)) return;
  float total[W];
  #pragma unroll
  for (int j = 0; j < W; j++) total[j] = 0.f;
  bool mine = true;
  for (int at = place; mine; at += AHEAD) {
    // Rows are read before it is known whether they count, since one after the other they would be waited for.
    Vec<T> rows[AHEAD];
    bool counts[AHEAD];
    #pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      const uint32 row = order[at + k < count ? at + k : place];
      counts[k] = at + k < count && ids[row] == id;
      rows[k] = load<T>(g, (size_t)row * PARTS + part);
    }
    #pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      mine = mine && counts[k];
      #pragma unroll
      for (int j = 0; j < W; j++) total[j] += mine ? static_cast<float>(rows[k].v[j]) : 0.f;
    }
  }
  Vec<T> sum;
  if (ONTO) sum = load<T>(out, (size_t)id * PARTS + part);
  #pragma unroll
  for (int j = 0; j < W; j++) sum.v[j] = static_cast<T>(ONTO ? static_cast<float>(sum.v[j]) + total[j] : total[j]);
  store<T>(out, (size_t)id * PARTS + part, sum);
}
"""

# x: (N, 2 F), gate beside up; out: (N, F).
SWIGLU = r"""
extern "C" __global__ void NAME(const T* x, T* out, int rows) {
  constexpr int W = Vec<T>::W;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)rows * (F / W)) return;
  size_t row = i / (F / W), at = row * (2 * F / W) + i % (F / W);
  Vec<T> gate = load<T>(x, at), up = load<T>(x, at + F / W), y;
  #pragma unroll
  for (int j = 0; j < W; j++) {
    float g = static_cast<float>(gate.v[j]);
    y.v[j] = static_cast<T>(g * logistic(g) * static_cast<float>(up.v[j]));
  }
  store<T>(out, i, y);
}
"""

# x: (N, 2 F); c: (N, F) cotangent; out: (N, 2 F); y: (N, F), with AGAIN, what SWIGLU gives.
SWIGLU_VJP = r"""
extern "C" __global__ void NAME(const T* x, const T* c, T* out, T* y, int rows) {
  constexpr int W = Vec<T>::W;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)rows * (F / W)) return;
  size_t row = i / (F / W), at = row * (2 * F / W) + i % (F / W);
  Vec<T> gate = load<T>(x, at), up = load<T>(x, at + F / W), cot = load<T>(c, i), dgate, dup, value;
  #pragma unroll
  for (int j = 0; j < W; j++) {
    float g = static_cast<float>(gate.v[j]), u = static_cast<float>(up.v[j]), d = static_cast<float>(cot.v[j]);
    float s = logistic(g);
    dup.v[j] = static_cast<T>(d * g * s);
    dgate.v[j] = static_cast<T>(d * u * s * (1.f + g * (1.f - s)));
    if (AGAIN) value.v[j] = static_cast<T>(g * s * u);
  }
  store<T>(out, at, dgate);
  store<T>(out, at + F / W, dup);
  if (AGAIN) store<T>(y, i, value);
}
"""

# What the next two have in common. A warp takes 32 columns through ROWS rows, 16 at a time, in four products of eight
# columns each; so that a thread's eight columns stand side by side, the products' columns are shared out by turns:
# column 8 (i / 2) + 2 j + i % 2 is column i of product j.
_WARPS = r"""
constexpr int ROWS = 64;

// Factors (K, 32) of which from[k * down + column * right] is one, two of a column in a word.
template <int K>
__device__ __forceinline__ void columns_of(uint32 (&to)[(K + 7) / 8][4], const T* from, size_t down, size_t right) {
  const int i = threadIdx.x % 32 / 4;
  #pragma unroll
  for (int part = 0; part < (K + 7) / 8; part++) {
    const int k = part * 8 + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      const T* at = from + k * down + (i / 2 * 8 + 2 * j + i % 2) * right;
      to[part][j] = k < K ? at[0].bits | (uint32)at[down].bits << 16 : 0;
    }
  }
}

// Factors (2, K) of two rows.
template <int K>
__device__ __forceinline__ void rows_of(uint32 (&to)[(K + 7) / 8][2], const T* first, const T* second) {
  #pragma unroll
  for (int part = 0; part < (K + 7) / 8; part++) {
    const int k = part * 8 + threadIdx.x % 4 * 2;
    to[part][0] = k < K ? *reinterpret_cast<const uint32*>(first + k) : 0;
    to[part][1] = k < K ? *reinterpret_cast<const uint32*>(second + k) : 0;
  }
}

// Values 2 j and 2 j + 1 of both rows, with the products added.
template <int PARTS>
__device__ __forceinline__ void adapted(
    float (&to)[4], const Vec<T> (&x)[2], int j, const uint32 (&left)[PARTS][2], const uint32 (&right)[PARTS][4]) {
  #pragma unroll
  for (int k = 0; k < 4; k++) to[k] = static_cast<float>(x[k / 2].v[2 * j + k % 2]);
  #pragma unroll
  for (int part = 0; part < PARTS; part++) add_product(to, left[part], right[part][j], T());
}

// Eight values that a thread has made of a row.
struct alignas(16) Words {
  uint32 v[4];
};
"""

# As SWIGLU of x + inner @ b, inner: (N, R) and b: (R, 2 F), whose first GATE rows belong to gate and the UP after them
# to up; the other quarters are zeros. Written out, inner @ b would be as large as x.
SWIGLU_ADAPTED = (
    _WARPS
    + r"""
extern "C" __global__ void NAME(const T* x, const T* inner, const T* b, T* out, int rows) {
  constexpr int BLOCKS = (F + 255) / 256;
  const int column = blockIdx.x % BLOCKS * 256 + threadIdx.x / 32 * 32, mine = column + threadIdx.x % 4 * 8;
  if (column >= F) return;
  uint32 gates[(GATE + 7) / 8][4], ups[(UP + 7) / 8][4];
  columns_of<GATE>(gates, b + column, 2 * F, 1);
  columns_of<UP>(ups, b + (size_t)GATE * 2 * F + F + column, 2 * F, 1);
  #pragma unroll 2
  for (int k = 0; k < ROWS; k += 16) {
    const int first = blockIdx.x / BLOCKS * ROWS + k;
    if (first >= rows) return;
    // Beyond the last row that one is computed again, and left.
    const int row = first + threadIdx.x % 32 / 4;
    const size_t at[2] = {(size_t)min(row, rows - 1), (size_t)min(row + 8, rows - 1)};
    Vec<T> gate[2], up[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      gate[h] = load<T>(x + at[h] * 2 * F + mine, 0);
      up[h] = load<T>(x + at[h] * 2 * F + F + mine, 0);
    }
    uint32 of_gate[(GATE + 7) / 8][2], of_up[(UP + 7) / 8][2];
    rows_of<GATE>(of_gate, inner + at[0] * R, inner + at[1] * R);
    rows_of<UP>(of_up, inner + at[0] * R + GATE, inner + at[1] * R + GATE);
    Words y[2];
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      float g[4], u[4];
      adapted(g, gate, j, of_gate, gates);
      adapted(u, up, j, of_up, ups);
      #pragma unroll
      for (int k = 0; k < 4; k++) g[k] *= logistic(g[k]) * u[k];
      y[0].v[j] = pair(g[0], g[1], T());
      y[1].v[j] = pair(g[2], g[3], T());
    }
    #pragma unroll
    for (int h = 0; h < 2; h++)
      if (row + 8 * h < rows) *reinterpret_cast<Words*>(out + at[h] * F + mine) = y[h];
  }
}
"""
)

# x, inner, b as above; the cotangent is c + cinner @ a.T with c: (N, F), cinner: (N, DOWN) and a: (F, DOWN);
# out: (N, 2 F), its gradient in x; y: (N, F), the value again.
SWIGLU_ADAPTED_VJP = (
    _WARPS
    + r"""
extern "C" __global__ void NAME(
    const T* x, const T* inner, const T* b, const T* c, const T* cinner, const T* a, T* out, T* y, int rows) {
  constexpr int BLOCKS = (F + 255) / 256;
  const int column = blockIdx.x % BLOCKS * 256 + threadIdx.x / 32 * 32, mine = column + threadIdx.x % 4 * 8;
  if (column >= F) return;
  uint32 gates[(GATE + 7) / 8][4], ups[(UP + 7) / 8][4], downs[(DOWN + 7) / 8][4];
  columns_of<GATE>(gates, b + column, 2 * F, 1);
  columns_of<UP>(ups, b + (size_t)GATE * 2 * F + F + column, 2 * F, 1);
  columns_of<DOWN>(downs, a + (size_t)column * DOWN, 1, DOWN);
  for (int k = 0; k < ROWS; k += 16) {
    const int first = blockIdx.x / BLOCKS * ROWS + k;
    if (first >= rows) return;
    const int row = first + threadIdx.x % 32 / 4;
    const size_t at[2] = {(size_t)min(row, rows - 1), (size_t)min(row + 8, rows - 1)};
    Vec<T> gate[2], up[2], cot[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      gate[h] = load<T>(x + at[h] * 2 * F + mine, 0);
      up[h] = load<T>(x + at[h] * 2 * F + F + mine, 0);
      cot[h] = load<T>(c + at[h] * F + mine, 0);
    }
    uint32 of_gate[(GATE + 7) / 8][2], of_up[(UP + 7) / 8][2], of_down[(DOWN + 7) / 8][2];
    rows_of<GATE>(of_gate, inner + at[0] * R, inner + at[1] * R);
    rows_of<UP>(of_up, inner + at[0] * R + GATE, inner + at[1] * R + GATE);
    rows_of<DOWN>(of_down, cinner + at[0] * DOWN, cinner + at[1] * DOWN);
    Words dgate[2], dup[2], value[2];
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      float g[4], u[4], d[4];
      adapted(g, gate, j, of_gate, gates);
      adapted(u, up, j, of_up, ups);
      adapted(d, cot, j, of_down, downs);
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        float of_g[2], of_u[2], v[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
          const float z = g[2 * h + i], s = logistic(z), silu = z * s;
          v[i] = silu * u[2 * h + i];
          of_u[i] = d[2 * h + i] * silu;
          of_g[i] = d[2 * h + i] * u[2 * h + i] * s * (1.f + z * (1.f - s));
        }
        dgate[h].v[j] = pair(of_g[0], of_g[1], T());
        dup[h].v[j] = pair(of_u[0], of_u[1], T());
        value[h].v[j] = pair(v[0], v[1], T());
      }
    }
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      if (row + 8 * h >= rows) continue;
      *reinterpret_cast<Words*>(out + at[h] * 2 * F + mine) = dgate[h];
      *reinterpret_cast<Words*>(out + at[h] * 2 * F + F + mine) = dup[h];
      *reinterpret_cast<Words*>(y + at[h] * F + mine) = value[h];
    }
  }
}
"""
)

# x, out: (B, T, H + 2 KV, D), heads of queries, keys and values; turns: (T or more, D / 2, 2) cosines and sines.
# Queries and keys are turned, values copied.
ROPE = r"""
extern "C" __global__ void NAME(const T* x, const float* turns, T* out, int rows, int length) {
  constexpr int W = Vec<T>::W, PART = D / 2 / W, HEADS = H + 2 * KV;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)rows * HEADS * PART) return;
  int part = i % PART;
  size_t head = i / PART;
  size_t at = head * (2 * PART) + part;
  Vec<T> a = load<T>(x, at), b = load<T>(x, at + PART);
  if (head % HEADS < H + KV) {
    const float2* turn = reinterpret_cast<const float2*>(turns) + (head / HEADS % length) * (D / 2) + part * W;
    #pragma unroll
    for (int j = 0; j < W; j++) {
      float2 t = turn[j];
      float u = static_cast<float>(a.v[j]), v = static_cast<float>(b.v[j]);
      a.v[j] = static_cast<T>(u * t.x - v * t.y);
      b.v[j] = static_cast<T>(v * t.x + u * t.y);
    }
  }
  store<T>(out, at, a);
  store<T>(out, at + PART, b);
}
"""

# q: (B, T, H, D), k and v: (B, T, KV, D) cotangents; out: (B, T, H + 2 KV, D), turned back.
ROPE_VJP = r"""
extern "C" __global__ void NAME(const T* q, const T* k, const T* v, const float* turns, T* out, int rows, int length) {
  constexpr int W = Vec<T>::W, PART = D / 2 / W, HEADS = H + 2 * KV;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)rows * HEADS * PART) return;
  int part = i % PART;
  size_t at = i / PART;
  int head = at % HEADS;
  size_t row = at / HEADS;
  const T* from = head < H ? q + (row * H + head) * D
      : head < H + KV      ? k + (row * KV + head - H) * D
                           : v + (row * KV + head - H - KV) * D;
  Vec<T> a = load<T>(from, part), b = load<T>(from, part + PART);
  if (head < H + KV) {
    const float2* turn = reinterpret_cast<const float2*>(turns) + (row % length) * (D / 2) + part * W;
    #pragma unroll
    for (int j = 0; j < W; j++) {
      float2 t = turn[j];
      float u = static_cast<float>(a.v[j]), v = static_cast<float>(b.v[j]);
      a.v[j] = static_cast<T>(u * t.x + v * t.y);
      b.v[j] = static_cast<T>(v * t.x - u * t.y);
    }
  }
  store<T>(out, at * (2 * PART) + part, a);
  store<T>(out, at * (2 * PART) + part + PART, b);
}
"""
