// logits: (N, V); targets: (N,), negative ones count nothing; loss: (N,); grad: (N, V), or with INPLACE the logits
// themselves. A block a row: once over it for the largest value and the sum, once more for the gradient.

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
