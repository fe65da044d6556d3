// y = x w^T + b for few rows of x, in float32. Every weight is read from memory once, and every sum is made in one order,
// so that what a row gives does not depend on the rows beside it.
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kGroup = 8, kOutputs = 6;
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined(__AVX2__)
constexpr int kLanes = 8, kGroup = 4, kOutputs = 3;
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
constexpr int kLanes = 4, kGroup = 4, kOutputs = 6;
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif

constexpr int kRows = 4;  // rows of x at a time, against kOutputs rows of w: the sums stay in registers

typedef float Lanes __attribute__((vector_size(kLanes * 4)));

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

// Sums of neighbours: those of a in the first half, those of b in the second.
inline Lanes neighbours(Lanes a, Lanes b) {
  return __builtin_shufflevector(a, b, EVEN) + __builtin_shufflevector(a, b, ODD);
}

// The totals of kGroup vectors, in the first kGroup lanes. The order of additions is the same for each.
inline Lanes totals(Lanes* sums) {
  for (int count = kGroup; count > 1; count /= 2)
    for (int index = 0; index < count / 2; ++index) sums[index] = neighbours(sums[2 * index], sums[2 * index + 1]);
  for (int width = kLanes / kGroup; width > 1; width /= 2) sums[0] = neighbours(sums[0], sums[0]);
  return sums[0];
}

// M rows of x against N rows of w.
template <int M, int N>
inline void block(const float* x, const float* w, const float* bias, float* y, long width, long outputs) {
  constexpr int kGroups = (M * N + kGroup - 1) / kGroup;
  Lanes sums[kGroups * kGroup] = {};
  long k = 0;
  for (; k + kLanes <= width; k += kLanes) {
    Lanes weights[N];
    for (int n = 0; n < N; ++n) weights[n] = load(w + n * width + k);
    for (int m = 0; m < M; ++m) {
      Lanes row = load(x + m * width + k);
      for (int n = 0; n < N; ++n) sums[m * N + n] += weights[n] * row;
    }
  }
  for (int group = 0; group < kGroups; ++group) {
    Lanes total = totals(sums + group * kGroup);
    for (int index = 0; index < kGroup && group * kGroup + index < M * N; ++index) {
      int m = (group * kGroup + index) / N, n = (group * kGroup + index) % N;
      float sum = total[index];
      for (long rest = k; rest < width; ++rest) sum += w[n * width + rest] * x[m * width + rest];
      y[m * outputs + n] = sum + (bias ? bias[n] : 0.0f);
    }
  }
}

// Outputs first to last of M rows, N at a time.
template <int M, int N>
void span(
    const float* x, const float* w, const float* bias, float* y, long width, long outputs, long first, long last) {
  long n = first;
  for (; n + N <= last; n += N) block<M, N>(x, w + n * width, bias ? bias + n : nullptr, y + n, width, outputs);
  for (; n < last; ++n) block<M, 1>(x, w + n * width, bias ? bias + n : nullptr, y + n, width, outputs);
}

typedef void (*Span)(const float*, const float*, const float*, float*, long, long, long, long);

// By the number of rows: fewer than kRows leave registers for more outputs, which read memory faster.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr Span kFew[] = {nullptr, span<1, 8>, span<2, 6>, span<3, 4>};
#else
constexpr Span kFew[] = {nullptr, span<1, 8>, span<2, 8>, span<3, 8>};
#endif
constexpr Span kMany[] = {nullptr, span<1, kOutputs>, span<2, kOutputs>, span<3, kOutputs>, span<4, kOutputs>};

}  // namespace

// x [count, width], w [outputs, width], bias [outputs] or null, y [count, outputs], all contiguous.
extern "C" void few_rows_linear(
    const float* x, const float* w, const float* bias, float* y, long count, long outputs, long width) {
  constexpr long kChunk = 48;
  long chunks = (outputs + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(static)
  for (long chunk = 0; chunk < chunks; ++chunk) {
    long first = chunk * kChunk, last = first + kChunk < outputs ? first + kChunk : outputs;
    if (count < kRows) {
      kFew[count](x, w, bias, y, width, outputs, first, last);
      continue;
    }
    for (long n = first; n < last; n += kOutputs) {  // these weights stay in the cache for all rows
      long end = n + kOutputs < last ? n + kOutputs : last;
      for (long m = 0; m < count; m += kRows) {
        int some = (int)(count - m < kRows ? count - m : kRows);
        kMany[some](x + m * width, w, bias, y + m * outputs, width, outputs, n, end);
      }
    }
  }
}
