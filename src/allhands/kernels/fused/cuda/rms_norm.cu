// x: (rows, D), and r beside it with RESIDUAL, which is added first and the sum written to sum; w: (D,);
// out: (rows, D). A warp a row.

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
