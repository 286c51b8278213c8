// squares, loss, tokens, rate, step: one number each; o: (7,) both betas, what they lack to one, epsilon, decay of
// weights, and the largest norm, below 0 for any; s: (2, 10) for adam.cu, of weights that are not decayed and of those
// that are; told: (2,) the norm of the mean gradient, and whether that and the loss are finite.

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
