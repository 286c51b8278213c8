"""The text of the CUDA kernels. ``T`` is the arrays' type; a thread reads 16 bytes of them at a time (``W`` values).

What belongs to the model is a constant of the kernel; how many rows there are it is told at each call, since a kernel
is built anew for every set of constants, and batches have many lengths. All arithmetic is in float32, rounded once at
the end, as the matrix products beside them do it. Nothing is included: headers take longer to read than the rest.
"""

from __future__ import annotations

HEADER = r"""
typedef unsigned int uint32;
#define INFINITY __int_as_float(0x7f800000)

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

typedef float float32;

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

template <typename U>
struct alignas(16) Vec {
  static constexpr int W = 16 / sizeof(U);
  U v[W];
};

template <typename U>
__device__ __forceinline__ Vec<U> load(const U* p, size_t i) {
  return reinterpret_cast<const Vec<U>*>(p)[i];
}

template <typename U>
__device__ __forceinline__ void store(U* p, size_t i, const Vec<U>& x) {
  reinterpret_cast<Vec<U>*>(p)[i] = x;
}

template <typename U>
struct alignas(4 * sizeof(U)) Quad {
  U v[4];
};

template <typename U>
__device__ __forceinline__ Quad<U> quad(const U* p, size_t i) {
  return reinterpret_cast<const Quad<U>*>(p)[i];
}

template <typename U>
__device__ __forceinline__ void widen(float (&to)[4], const Quad<U>& x) {
  #pragma unroll
  for (int j = 0; j < 4; j++) to[j] = static_cast<float>(x.v[j]);
}

// to += inner[0:N] @ factors
template <typename U, int N>
__device__ __forceinline__ void add_products(float (&to)[4], const U* inner, const float (&factors)[N][4]) {
  constexpr int W = Vec<U>::W;
  #pragma unroll
  for (int part = 0; part < N / W; part++) {
    Vec<U> v = load<U>(inner, part);
    #pragma unroll
    for (int k = 0; k < W; k++) {
      float value = static_cast<float>(v.v[k]);
      #pragma unroll
      for (int j = 0; j < 4; j++) to[j] = fmaf(value, factors[part * W + k][j], to[j]);
    }
  }
}

__device__ __forceinline__ float logistic(float x) {
  return 1.f / (1.f + __expf(-x));
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
extern "C" __global__ void NAME(const int* ids, const uint32* order, const T* g, T* out, int count) {
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
  #pragma unroll
  for (int j = 0; j < W; j++) sum.v[j] = static_cast<T>(total[j]);
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

# As SWIGLU of x + inner @ b, inner: (N, R) and b: (R, 2 F), whose first GATE rows belong to gate and the UP after them
# to up; the other quarters are zeros. A thread takes four columns of both, whose factors it keeps, through 32 rows:
# written out, inner @ b would be as large as x.
SWIGLU_ADAPTED = r"""
extern "C" __global__ void NAME(const T* x, const T* inner, const T* b, T* out, int rows) {
  constexpr int BLOCKS = (F / 4 + 255) / 256;
  const int column = (blockIdx.x % BLOCKS) * 256 + threadIdx.x;
  if (column >= F / 4) return;
  float gates[GATE][4], ups[UP][4];
  #pragma unroll
  for (int r = 0; r < GATE; r++) widen(gates[r], quad(b + (size_t)r * 2 * F, column));
  #pragma unroll
  for (int r = 0; r < UP; r++) widen(ups[r], quad(b + (size_t)(GATE + r) * 2 * F + F, column));
  const size_t first = (size_t)(blockIdx.x / BLOCKS) * 32;
  #pragma unroll 2
  for (int k = 0; k < 32; k++) {
    const size_t row = first + k;
    if (row >= rows) return;
    float gate[4], up[4];
    widen(gate, quad(x + row * 2 * F, column));
    widen(up, quad(x + row * 2 * F + F, column));
    add_products(gate, inner + row * R, gates);
    add_products(up, inner + row * R + GATE, ups);
    Quad<T> y;
    #pragma unroll
    for (int j = 0; j < 4; j++) y.v[j] = static_cast<T>(gate[j] * logistic(gate[j]) * up[j]);
    reinterpret_cast<Quad<T>*>(out + row * F)[column] = y;
  }
}
"""

# x, inner, b as above; the cotangent is c + cinner @ a.T with c: (N, F), cinner: (N, DOWN) and a: (F, DOWN);
# out: (N, 2 F), its gradient in x; y: (N, F), the value again.
SWIGLU_ADAPTED_VJP = r"""
extern "C" __global__ void NAME(
    const T* x, const T* inner, const T* b, const T* c, const T* cinner, const T* a, T* out, T* y, int rows) {
  constexpr int BLOCKS = (F / 4 + 255) / 256;
  const int column = (blockIdx.x % BLOCKS) * 256 + threadIdx.x;
  if (column >= F / 4) return;
  float gates[GATE][4], ups[UP][4], downs[DOWN][4];
  #pragma unroll
  for (int r = 0; r < GATE; r++) widen(gates[r], quad(b + (size_t)r * 2 * F, column));
  #pragma unroll
  for (int r = 0; r < UP; r++) widen(ups[r], quad(b + (size_t)(GATE + r) * 2 * F + F, column));
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    #pragma unroll
    for (int r = 0; r < DOWN; r++) downs[r][j] = static_cast<float>(a[(size_t)(column * 4 + j) * DOWN + r]);
  }
  const size_t first = (size_t)(blockIdx.x / BLOCKS) * 32;
  #pragma unroll 2
  for (int k = 0; k < 32; k++) {
    const size_t row = first + k;
    if (row >= rows) return;
    float gate[4], up[4], cot[4];
    widen(gate, quad(x + row * 2 * F, column));
    widen(up, quad(x + row * 2 * F + F, column));
    widen(cot, quad(c + row * F, column));
    add_products(gate, inner + row * R, gates);
    add_products(up, inner + row * R + GATE, ups);
    add_products(cot, cinner + row * DOWN, downs);
    Quad<T> dgate, dup, value;
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      float g = gate[j], s = logistic(g);
      dup.v[j] = static_cast<T>(cot[j] * g * s);
      dgate.v[j] = static_cast<T>(cot[j] * up[j] * s * (1.f + g * (1.f - s)));
      value.v[j] = static_cast<T>(g * s * up[j]);
    }
    reinterpret_cast<Quad<T>*>(out + row * 2 * F)[column] = dgate;
    reinterpret_cast<Quad<T>*>(out + row * 2 * F + F)[column] = dup;
    reinterpret_cast<Quad<T>*>(y + row * F)[column] = value;
  }
}
"""

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
