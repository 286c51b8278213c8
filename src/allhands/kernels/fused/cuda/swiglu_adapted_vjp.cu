// x, inner, b as in swiglu_adapted.cu; the cotangent is c + cinner @ a.T with c: (N, F), cinner: (N, DOWN) and
// a: (F, DOWN); out: (N, 2 F), its gradient in x; y: (N, F), the value again.
#include "warps.cuh"

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
