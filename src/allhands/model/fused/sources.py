"""The text of the CUDA kernels. ``T`` is the arrays' type; a thread reads 16 bytes of them at a time (``W`` values).

All arithmetic is in float32, rounded once at the end, as the matrix products beside them do it.
"""

from __future__ import annotations

HEADER = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T>
struct alignas(16) Vec {
  static constexpr int W = 16 / sizeof(T);
  T v[W];
};

template <typename T>
__device__ __forceinline__ Vec<T> load(const T* p, size_t i) {
  return reinterpret_cast<const Vec<T>*>(p)[i];
}

template <typename T>
__device__ __forceinline__ void store(T* p, size_t i, const Vec<T>& x) {
  reinterpret_cast<Vec<T>*>(p)[i] = x;
}

__device__ __forceinline__ float logistic(float x) {
  return 1.f / (1.f + __expf(-x));
}
"""

# w: (N, K / 8) uint32 of 4 bits each; s, b: (N, K / GROUP); out: (N, K). A thread makes four words, one of each quarter
# of what its block makes, so that neighbours read and write neighbouring words.
DEQUANTIZE = r"""
  constexpr int WORDS = GROUP / 8;
  size_t first = (size_t)blockIdx.x * 1024 + threadIdx.x;
  uint32_t word[4];
  float scale[4], bias[4];
  #pragma unroll
  for (int k = 0; k < 4; k++) {
    size_t i = first + k * 256;
    if (i < COUNT) {
      word[k] = w[i];
      scale[k] = static_cast<float>(s[i / WORDS]);
      bias[k] = static_cast<float>(b[i / WORDS]);
    }
  }
  #pragma unroll
  for (int k = 0; k < 4; k++) {
    size_t i = first + k * 256;
    if (i < COUNT) {
      alignas(16) T values[8];
      #pragma unroll
      for (int j = 0; j < 8; j++)
        values[j] = static_cast<T>(fmaf(static_cast<float>((word[k] >> (4 * j)) & 15), scale[k], bias[k]));
      // Written past the cache, which the matrix product that reads it needs for its input.
      __stcs(reinterpret_cast<uint4*>(out) + i, *reinterpret_cast<uint4*>(values));
    }
  }
"""

# x: (ROWS, 2 F), gate beside up; out: (ROWS, F).
SWIGLU = r"""
  constexpr int W = Vec<T>::W;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)ROWS * (F / W)) return;
  size_t row = i / (F / W), at = row * (2 * F / W) + i % (F / W);
  Vec<T> gate = load<T>(x, at), up = load<T>(x, at + F / W), y;
  #pragma unroll
  for (int j = 0; j < W; j++) {
    float g = static_cast<float>(gate.v[j]);
    y.v[j] = static_cast<T>(g * logistic(g) * static_cast<float>(up.v[j]));
  }
  store<T>(out, i, y);
"""

# x: (ROWS, 2 F); c: (ROWS, F) cotangent; out: (ROWS, 2 F).
SWIGLU_VJP = r"""
  constexpr int W = Vec<T>::W;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)ROWS * (F / W)) return;
  size_t row = i / (F / W), at = row * (2 * F / W) + i % (F / W);
  Vec<T> gate = load<T>(x, at), up = load<T>(x, at + F / W), cot = load<T>(c, i), dgate, dup;
  #pragma unroll
  for (int j = 0; j < W; j++) {
    float g = static_cast<float>(gate.v[j]), u = static_cast<float>(up.v[j]), d = static_cast<float>(cot.v[j]);
    float s = logistic(g);
    dup.v[j] = static_cast<T>(d * g * s);
    dgate.v[j] = static_cast<T>(d * u * s * (1.f + g * (1.f - s)));
  }
  store<T>(out, at, dgate);
  store<T>(out, at + F / W, dup);
"""

# x, out: (ROWS, H + 2 KV, D), heads of queries, keys and values; turns: (LENGTH, D / 2, 2) cosines and sines. Queries
# and keys are turned, values copied.
ROPE = r"""
  constexpr int W = Vec<T>::W, PART = D / 2 / W, HEADS = H + 2 * KV;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)ROWS * HEADS * PART) return;
  int part = i % PART;
  size_t head = i / PART;
  size_t at = head * (2 * PART) + part;
  Vec<T> a = load<T>(x, at), b = load<T>(x, at + PART);
  if (head % HEADS < H + KV) {
    const float2* turn = reinterpret_cast<const float2*>(turns) + (head / HEADS % LENGTH) * (D / 2) + part * W;
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
"""

# q: (ROWS, H, D), k and v: (ROWS, KV, D) cotangents; out: (ROWS, H + 2 KV, D), turned back.
ROPE_VJP = r"""
  constexpr int W = Vec<T>::W, PART = D / 2 / W, HEADS = H + 2 * KV;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)ROWS * HEADS * PART) return;
  int part = i % PART;
  size_t at = i / PART;
  int head = at % HEADS;
  size_t row = at / HEADS;
  const T* from = head < H ? q + (row * H + head) * D
      : head < H + KV      ? k + (row * KV + head - H) * D
                           : v + (row * KV + head - H - KV) * D;
  Vec<T> a = load<T>(from, part), b = load<T>(from, part + PART);
  if (head < H + KV) {
    const float2* turn = reinterpret_cast<const float2*>(turns) + (row % LENGTH) * (D / 2) + part * W;
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
"""

# logits: (ROWS, V); targets: (ROWS,), negative ones count nothing; loss: (ROWS,); grad: (ROWS, V). A block a row: once
# over it for the largest value and the sum, once more for the gradient.
CROSS_ENTROPY = r"""
  constexpr int W = Vec<T>::W, PARTS = V / W, THREADS = 1024;
  const int row = blockIdx.x, thread = threadIdx.x;
  const T* from = logits + (size_t)row * V;
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
  const int target = targets[row];
  const float counts = target < 0 ? 0.f : 1.f;
  if (thread == 0) loss[row] = target < 0 ? 0.f : normaliser - static_cast<float>(from[target]);
  for (int i = thread; i < PARTS; i += THREADS) {
    Vec<T> x = load<T>(from, i);
    #pragma unroll
    for (int j = 0; j < W; j++) {
      float p = __expf(static_cast<float>(x.v[j]) - normaliser);
      x.v[j] = static_cast<T>(counts == 0.f ? 0.f : i * W + j == target ? p - 1.f : p);
    }
    store<T>(grad + (size_t)row * V, i, x);
  }
"""

# x, c: (ROWS, D) input and cotangent; w: (D,); eps: (1,); dx: (ROWS, D); dw: (blocks, D) float32 sums over EACH rows. A
# thread keeps 1 / THREADS of the columns, the whole block a row.
RMS_NORM_VJP = r"""
  constexpr int W = Vec<T>::W, PARTS = D / W, MINE = (PARTS + THREADS - 1) / THREADS;
  const int thread = threadIdx.x;
  __shared__ float squares[32], products[32];
  float weight[MINE][W], total[MINE][W];
  #pragma unroll
  for (int m = 0; m < MINE; m++) {
    int part = m * THREADS + thread;
    Vec<T> q;
    if (part < PARTS) q = load<T>(w, part);
    #pragma unroll
    for (int j = 0; j < W; j++) {
      weight[m][j] = part < PARTS ? static_cast<float>(q.v[j]) : 0.f;
      total[m][j] = 0.f;
    }
  }
  for (int r = 0; r < EACH; r++) {
    size_t row = (size_t)blockIdx.x * EACH + r;
    if (row >= ROWS) break;
    float input[MINE][W], cot[MINE][W], square = 0.f, product = 0.f;
    #pragma unroll
    for (int m = 0; m < MINE; m++) {
      int part = m * THREADS + thread;
      Vec<T> q, e;
      if (part < PARTS) {
        q = load<T>(x, row * PARTS + part);
        e = load<T>(c, row * PARTS + part);
      }
      #pragma unroll
      for (int j = 0; j < W; j++) {
        input[m][j] = part < PARTS ? static_cast<float>(q.v[j]) : 0.f;
        cot[m][j] = part < PARTS ? static_cast<float>(e.v[j]) : 0.f;
        square += input[m][j] * input[m][j];
        product += input[m][j] * cot[m][j] * weight[m][j];
      }
    }
    for (int o = 16; o > 0; o >>= 1) {
      square += __shfl_xor_sync(~0u, square, o);
      product += __shfl_xor_sync(~0u, product, o);
    }
    if (thread % 32 == 0) {
      squares[thread / 32] = square;
      products[thread / 32] = product;
    }
    __syncthreads();
    square = product = 0.f;
    #pragma unroll
    for (int k = 0; k < THREADS / 32; k++) {
      square += squares[k];
      product += products[k];
    }
    __syncthreads();
    float n = rsqrtf(square / D + eps[0]);
    float pull = product * n * n * n / D;
    #pragma unroll
    for (int m = 0; m < MINE; m++) {
      int part = m * THREADS + thread;
      Vec<T> y;
      #pragma unroll
      for (int j = 0; j < W; j++) {
        total[m][j] += cot[m][j] * input[m][j] * n;
        y.v[j] = static_cast<T>(n * weight[m][j] * cot[m][j] - pull * input[m][j]);
      }
      if (part < PARTS) store<T>(dx, row * PARTS + part, y);
    }
  }
  #pragma unroll
  for (int m = 0; m < MINE; m++) {
    int part = m * THREADS + thread;
    if (part < PARTS) {
      #pragma unroll
      for (int j = 0; j < W; j++) dw[(size_t)blockIdx.x * D + part * W + j] = total[m][j];
    }
  }
"""

# x: (COUNT,); out: (blocks,) float32 sums of squares, each of every blocks-th stretch.
SUM_OF_SQUARES = r"""
  constexpr int W = Vec<T>::W;
  float sum = 0.f;
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < COUNT / W; i += (size_t)gridDim.x * blockDim.x) {
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
"""

# g, w, m, v: (COUNT,) gradient, weight and moments; s: (8,) float32: factor of the gradient, whether to update at all,
# learning rate, both betas, epsilon, factor of the weight, factor of the root.
ADAM = r"""
  constexpr int W = Vec<T>::W;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= COUNT / W) return;
  Vec<T> weight = load<T>(w, i), first = load<T>(m, i), second = load<T>(v, i), gradient = load<T>(g, i);
  if (s[1] != 0.f) {
    #pragma unroll
    for (int j = 0; j < W; j++) {
      float d = static_cast<float>(gradient.v[j]) * s[0];
      float a = s[3] * static_cast<float>(first.v[j]) + (1.f - s[3]) * d;
      float b = s[4] * static_cast<float>(second.v[j]) + (1.f - s[4]) * d * d;
      first.v[j] = static_cast<T>(a);
      second.v[j] = static_cast<T>(b);
      weight.v[j] = static_cast<T>(
          static_cast<float>(weight.v[j]) * s[6] - __fdividef(s[2] * a, __fsqrt_rn(b) * s[7] + s[5]));
    }
  }
  store<T>(new_w, i, weight);
  store<T>(new_m, i, first);
  store<T>(new_v, i, second);
"""
