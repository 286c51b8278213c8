// x, c: (rows, D) input and cotangent; r: (rows, D), with RESIDUAL, a cotangent of x itself, which is added; w: (D,);
// dx: (rows, D); dw, with TRAINED: (blocks, D) float32 sums over each block's rows. WARPS warps a row, 8 a block.

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
