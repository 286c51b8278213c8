// As swiglu.cu of x + inner @ b, inner: (N, R) and b: (R, 2 F), whose first GATE rows belong to gate and the UP after
// them to up; the other quarters are zeros. Written out, inner @ b would be as large as x.
#include "warps.cuh"

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
