"""The text of the CUDA kernels that add up rows or go over all weights; what holds for :mod:`sources` holds here."""

from __future__ import annotations

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

# x: (count,); out: (blocks,) float32 sums of squares, each of every blocks-th stretch, with AFTER onto those before.
SUM_OF_SQUARES = r"""
extern "C" __global__ void NAME(const T* x, const float* before, float* out, int count) {
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
    out[blockIdx.x] = AFTER ? before[blockIdx.x] + sum : sum;
  }
}
"""

# squares, loss, tokens, rate, step: one number each; o: (7,) both betas, what they lack to one, epsilon, decay of
# weights, and the largest norm, below 0 for any; s: (2, 10) for ADAM, of weights that are not decayed and of those
# that are; told: (2,) the norm of the mean gradient, and whether that and the loss are finite.
ADAM_SCALARS = r"""
extern "C" __global__ void NAME(
    const float* squares, const float* loss, const float* tokens, const float* rate, const float* step, const float* o,
    float* s, float* told) {
  if (threadIdx.x >= 2) return;
  const float divisor = fmaxf(tokens[0], 1.f), norm = sqrtf(squares[0]) / divisor;
  const bool finite = isfinite(norm) && isfinite(loss[0]);
  const float factor = o[6] >= 0.f ? fminf(o[6] / (norm + 1e-6f), 1.f) : 1.f;
  float* to = s + 10 * threadIdx.x;
  to[0] = factor / divisor;
  to[1] = finite ? 1.f : 0.f;
  to[2] = BIAS ? rate[0] / (1.f - powf(o[0], step[0])) : rate[0];
  to[3] = o[0];
  to[4] = o[1];
  to[5] = o[4];
  to[6] = threadIdx.x ? 1.f - rate[0] * o[5] : 1.f;
  to[7] = BIAS ? rsqrtf(1.f - powf(o[1], step[0])) : 1.f;
  to[8] = o[2];
  to[9] = o[3];
  if (threadIdx.x) return;
  told[0] = norm;
  told[1] = to[1];
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

# The same where the weight has a float32 copy, w, which is updated, as are its float32 moments; rounded: (count,) the
# new weight in its own type.
ADAM_MASTER = r"""
extern "C" __global__ void NAME(
    const T* g, const float* w, const float* m, const float* v, const float* s,
    T* rounded, float* new_w, float* new_m, float* new_v, int count) {
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count / 4) return;
  Vec<float> weight = load<float>(w, i), first = load<float>(m, i), second = load<float>(v, i);
  Quad<T> gradient = quad(g, i), out;
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    if (s[1] != 0.f) {
      float d = static_cast<float>(gradient.v[j]) * s[0];
      float a = s[3] * first.v[j] + s[8] * d;
      float b = s[4] * second.v[j] + s[9] * d * d;
      first.v[j] = a;
      second.v[j] = b;
      weight.v[j] = weight.v[j] * s[6] - __fdividef(s[2] * a, __fsqrt_rn(b) * s[7] + s[5]);
    }
    out.v[j] = static_cast<T>(weight.v[j]);
  }
  reinterpret_cast<Quad<T>*>(rounded)[i] = out;
  store<float>(new_w, i, weight);
  store<float>(new_m, i, first);
  store<float>(new_v, i, second);
}
"""
