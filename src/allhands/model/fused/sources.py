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

# logits: (N, V); targets: (N,), negative ones count nothing; loss: (N,); grad: (N, V), or with INPLACE the logits
# themselves. A block a row: once over it for the largest value and the sum, once more for the gradient.
CROSS_ENTROPY = r"""
extern "C" __global__ void NAME(const T* logits, const int* targets, float* loss, T* grad) {
  if (INPLACE) grad = const_cast<T*>(logits);
  constexpr int W = Vec<T>::W, PARTS = V / W, THREADS = 1024;
  const int row = blockIdx.x, thread = threadIdx.x;
  const T* from = logits + (size_t)row * V;
  const int target = targets[row];
  // Before the first of the block's threads may write there.
  const float wanted = static_cast<float>(from[target < 0 ? 0 : target]);
  float most = -INFINITY, sum = 0.f;
  for (int i = thread; i < PARTS; i += THREADS) {
    Vec<T> x = load<T>(from, i);
    float higher = most;
    #pragma unroll
    for (int j = 0; j < W; j++) higher = fmaxf(higher, static_cast<float>(x.v[j]));
    float part = 0.f;
    #pragma unroll
    for (int j = 0; j < W; j++) part += __expf(static_cast<float>(x.v[j]) - higher);
    sum = (most == -INFINITY ? 0.f : sum * __expf(most - higher)) + part;
    most = higher;
  }
  __shared__ float all_most[32], all_sums[32];
  #pragma unroll
  for (int round = 0; round < 2; round++) {
    for (int o = 16; o > 0; o >>= 1) {
      float other = __shfl_xor_sync(~0u, most, o), other_sum = __shfl_xor_sync(~0u, sum, o);
      float higher = fmaxf(most, other);
      sum = (most == -INFINITY ? 0.f : sum * __expf(most - higher))
          + (other == -INFINITY ? 0.f : other_sum * __expf(other - higher));
      most = higher;
    }
    if (round == 0) {
      if (thread % 32 == 0) {
        all_most[thread / 32] = most;
        all_sums[thread / 32] = sum;
      }
      __syncthreads();
      most = all_most[thread % 32];
      sum = all_sums[thread % 32];
    }
  }
  const float normaliser = most + logf(sum);
  const float counts = target < 0 ? 0.f : 1.f;
  if (thread == 0) loss[row] = target < 0 ? 0.f : normaliser - wanted;
  for (int i = thread; i < PARTS; i += THREADS) {
    Vec<T> x = load<T>(from, i);
    #pragma unroll
    for (int j = 0; j < W; j++) {
      float p = __expf(static_cast<float>(x.v[j]) - normaliser);
      x.v[j] = static_cast<T>(counts == 0.f ? 0.f : i * W + j == target ? p - 1.f : p);
    }
    store<T>(grad + (size_t)row * V, i, x);
  }
}
"""

# x: (rows, D), and r beside it with RESIDUAL, which is added first and the sum written to sum; w: (D,);
# out: (rows, D). A warp a row.
RMS_NORM = r"""
extern "C" __global__ void NAME(const T* x, const T* r, const T* w, T* out, T* sum, int rows) {
  constexpr int W = Vec<T>::W, PARTS = D / W, MINE = (PARTS + 31) / 32;
  const int lane = threadIdx.x % 32;
  const size_t row = (size_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  Vec<T> input[MINE];
  float square = 0.f;
  #pragma unroll
  for (int m = 0; m < MINE; m++) {
    int part = m * 32 + lane;
    if (part < PARTS) {
      input[m] = load<T>(x, row * PARTS + part);
      if (RESIDUAL) {
        Vec<T> more = load<T>(r, row * PARTS + part);
        #pragma unroll
        for (int j = 0; j < W; j++)
          input[m].v[j] = static_cast<T>(static_cast<float>(input[m].v[j]) + static_cast<float>(more.v[j]));
        store<T>(sum, row * PARTS + part, input[m]);
      }
      #pragma unroll
      for (int j = 0; j < W; j++) square += static_cast<float>(input[m].v[j]) * static_cast<float>(input[m].v[j]);
    }
  }
  const float n = rsqrtf(warp_sum(square) / D + EPS);
  #pragma unroll
  for (int m = 0; m < MINE; m++) {
    int part = m * 32 + lane;
    if (part < PARTS) {
      Vec<T> weight = load<T>(w, part);
      #pragma unroll
      for (int j = 0; j < W; j++)
        input[m].v[j] =
            static_cast<T>(static_cast<float>(static_cast<T>(static_cast<float>(input[m].v[j]) * n)) *
                           static_cast<float>(weight.v[j]));
      store<T>(out, row * PARTS + part, input[m]);
    }
  }
}
"""

# x, c: (rows, D) input and cotangent; r: (rows, D), with RESIDUAL, a cotangent of x itself, which is added; w: (D,);
# dx: (rows, D); dw, with TRAINED: (blocks, D) float32 sums over each block's rows. WARPS warps a row, 8 a block.
RMS_NORM_VJP = r"""
extern "C" __global__ void NAME(
    const T* x, const T* w, const T* c, const T* r, T* dx, float* dw, int rows) {
  constexpr int W = Vec<T>::W, PARTS = D / W, LANES = 32 * WARPS;
  constexpr int MINE = (PARTS + LANES - 1) / LANES, GROUPS = 8 / WARPS;
  const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  __shared__ float squares[8], products[8];
  Vec<T> weight[MINE];
  float total[MINE][W];
  #pragma unroll
  for (int m = 0; m < MINE; m++) {
    int part = m * LANES + lane;
    if (part < PARTS) weight[m] = load<T>(w, part);
    #pragma unroll
    for (int j = 0; j < W; j++) total[m][j] = 0.f;
  }
  const size_t stride = (size_t)gridDim.x * GROUPS;
  // All groups of a block go round as often as the first, which waits for them.
  for (size_t first = (size_t)blockIdx.x * GROUPS; first < rows; first += stride) {
    const size_t row = first + group;
    Vec<T> input[MINE], cot[MINE];
    float square = 0.f, product = 0.f;
    #pragma unroll
    for (int m = 0; m < MINE; m++) {
      int part = m * LANES + lane;
      if (part < PARTS && row < rows) {
        input[m] = load<T>(x, row * PARTS + part);
        cot[m] = load<T>(c, row * PARTS + part);
        #pragma unroll
        for (int j = 0; j < W; j++) {
          float value = static_cast<float>(input[m].v[j]);
          square += value * value;
          product += value * static_cast<float>(cot[m].v[j]) * static_cast<float>(weight[m].v[j]);
        }
      }
    }
    square = warp_sum(square);
    product = warp_sum(product);
    if (WARPS > 1) {
      if (threadIdx.x % 32 == 0) {
        squares[threadIdx.x / 32] = square;
        products[threadIdx.x / 32] = product;
      }
      __syncthreads();
      square = product = 0.f;
      #pragma unroll
      for (int k = 0; k < WARPS; k++) {
        square += squares[group * WARPS + k];
        product += products[group * WARPS + k];
      }
      __syncthreads();
    }
    const float n = rsqrtf(square / D + EPS), pull = product * n * n * n / D;
    #pragma unroll
    for (int m = 0; m < MINE; m++) {
      int part = m * LANES + lane;
      if (part < PARTS && row < rows) {
        Vec<T> y, more;
        if (RESIDUAL) more = load<T>(r, row * PARTS + part);
        #pragma unroll
        for (int j = 0; j < W; j++) {
          float value = static_cast<float>(input[m].v[j]), change = static_cast<float>(cot[m].v[j]);
          if (TRAINED) total[m][j] += change * value * n;
          float d = n * static_cast<float>(weight[m].v[j]) * change - pull * value;
          y.v[j] = static_cast<T>(RESIDUAL ? d + static_cast<float>(more.v[j]) : d);
        }
        store<T>(dx, row * PARTS + part, y);
      }
    }
  }
  if (TRAINED) {
    __shared__ float sums[D];
    // One group after the other, so that the order of the sum is always the same.
    for (int g = 0; g < GROUPS; g++) {
      if (group == g) {
        #pragma unroll
        for (int m = 0; m < MINE; m++) {
          int part = m * LANES + lane;
          if (part < PARTS) {
            #pragma unroll
            for (int j = 0; j < W; j++) sums[part * W + j] = (g ? sums[part * W + j] : 0.f) + total[m][j];
          }
        }
      }
      __syncthreads();
    }
    for (int i = threadIdx.x; i < D; i += blockDim.x) dw[(size_t)blockIdx.x * D + i] = sums[i];
  }
}
"""

# x: (count,); out: (blocks,) float32 sums of squares, each of every blocks-th stretch.
SUM_OF_SQUARES = r"""
extern "C" __global__ void NAME(const T* x, float* out, int count) {
  constexpr int W = Vec<T>::W;
  float sum = 0.f;
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count / W; i += (size_t)gridDim.x * blockDim.x) {
    Vec<T> q = load<T>(x, i);
    #pragma unroll
    for (int j = 0; j < W; j++) {
      float value = static_cast<float>(q.v[j]);
      sum += value * value;
    }
  }
  __shared__ float sums[8];
  for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0.f;
    for (int k = 0; k < 8; k++) sum += sums[k];
    out[blockIdx.x] = sum;
  }
}
"""

# g, w, m, v: (count,) gradient, weight and moments; s: (10,) float32: factor of the gradient, whether to update at all,
# learning rate, both betas, epsilon, factor of the weight, factor of the root, and what both betas lack to one, since
# 0.001 is not what float32 makes of 1 - 0.999.
ADAM = r"""
extern "C" __global__ void NAME(
    const T* g, const T* w, const T* m, const T* v, const float* s, T* new_w, T* new_m, T* new_v, int count) {
  constexpr int W = Vec<T>::W;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count / W) return;
  Vec<T> weight = load<T>(w, i), first = load<T>(m, i), second = load<T>(v, i), gradient = load<T>(g, i);
  if (s[1] != 0.f) {
    #pragma unroll
    for (int j = 0; j < W; j++) {
      float d = static_cast<float>(gradient.v[j]) * s[0];
      float a = s[3] * static_cast<float>(first.v[j]) + s[8] * d;
      float b = s[4] * static_cast<float>(second.v[j]) + s[9] * d * d;
      first.v[j] = static_cast<T>(a);
      second.v[j] = static_cast<T>(b);
      weight.v[j] = static_cast<T>(
          static_cast<float>(weight.v[j]) * s[6] - __fdividef(s[2] * a, __fsqrt_rn(b) * s[7] + s[5]));
    }
  }
  store<T>(new_w, i, weight);
  store<T>(new_m, i, first);
  store<T>(new_v, i, second);
}
"""
