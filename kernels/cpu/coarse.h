// Linear layers over weights in 8 bits, for what need not be exact: a draft head is read from memory at every pass, and half
// the bytes are nearly half the time. The target verifies what comes of it.
//
// Weights are scaled by output and inputs by row, to 8 and 14 bits, and their products summed as integers.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <cmath>
#include <vector>

#include "linear.h"

namespace eagle {

typedef int32_t i32x16 __attribute__((vector_size(64)));

constexpr float LARGEST_WEIGHT = 127.0f, LARGEST_INPUT = 8191.0f;
constexpr int64_t EXACT = 1024;  // steps whose sums fit into 32 bits: 2 * 1024 * 127 * 8191 < 2^31

// A packed block of 64 outputs: their scales, then pairs of weights of every output, pair after pair.
inline int64_t coarse_block_bytes(int64_t width) { return BLOCK * (int64_t(sizeof(float)) + width); }

inline bool is_coarse(const Tensor& packed) { return packed.scalar_type() == at::kByte; }

// Two weights for each of 16 outputs, as one row of inputs meets them.
struct CoarseWeights {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  __m512i words;
  explicit CoarseWeights(const int8_t* w) : words(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)w))) {}
  void add(i32x16& sum, const int16_t* x) const {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    sum = (i32x16)_mm512_dpwssd_epi32((__m512i)sum, words, _mm512_set1_epi32(pair));
  }
#else
  i32x16 first, second;
  explicit CoarseWeights(const int8_t* w) {
    typedef uint16_t u16x16 __attribute__((vector_size(32)));
    u16x16 pairs;
    std::memcpy(&pairs, w, 32);
    i32x16 both = __builtin_convertvector(pairs, i32x16);
    first = (both << 24) >> 24, second = (both << 16) >> 24;
  }
  void add(i32x16& sum, const int16_t* x) const { sum += first * x[0] + second * x[1]; }
#endif
};

// Numbers in so many bits: the greatest becomes `largest`. Returns what one unit is worth, NaN where one is no number.
template <typename T, typename W>
float in_units(const T* x, int64_t count, float largest, W* words) {
  f32x16 tops = {}, odds = {};
  float most = 0, odd = 0;  // odd: NaN where one is not finite
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    f32x16 here = std::bit_cast<f32x16>(std::bit_cast<u32x16>(load16(x + i)) & 0x7fffffffu);
    tops = here > tops ? here : tops;
    odds += here * 0.0f;
  }
  for (int64_t lane = 0; lane < LANES; ++lane) most = std::max(most, tops[lane]), odd += odds[lane];
  for (int64_t k = i; k < count; ++k) most = std::max(most, std::abs(as_float(x[k]))), odd += as_float(x[k]) * 0.0f;
  float turn = largest / most;
  if (odd != 0 || !std::isfinite(turn)) {  // or next to nothing
    std::fill(words, words + count, W(0));
    return odd != 0 ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  }
  constexpr float WHOLE = 12582912.0f;  // from where on a float has no fraction
  for (i = 0; i + LANES <= count; i += LANES) {
    i32x16 whole = __builtin_convertvector((load16(x + i) * turn + WHOLE) - WHOLE, i32x16);
    for (int64_t lane = 0; lane < LANES; ++lane) words[i + lane] = W(whole[lane]);
  }
  for (; i < count; ++i) words[i] = W((as_float(x[i]) * turn + WHOLE) - WHOLE);
  return most / largest;
}

// Rows of inputs in 14 bits.
struct CoarseRows {
  int64_t width;
  std::vector<int16_t> words;
  std::vector<float> scales;

  template <typename T>
  CoarseRows(const T* x, int64_t rows, int64_t width) : width(width), words(rows * width), scales(rows) {
    for (int64_t m = 0; m < rows; ++m) scales[m] = in_units(x + m * width, width, LARGEST_INPUT, words.data() + m * width);
  }
};

// What a row's sums are worth, for one vector of a block's outputs from the `first` on.
template <typename T>
void store_scaled(f32x16 sum, const char* packed, float scale, const T* bias, T* out, int64_t first, int64_t outputs) {
  int64_t count = std::min(LANES, outputs - first);
  if (count <= 0) return;
  f32x16 scaled = sum * (load16((const float*)packed + first) * scale);
  if (bias) add_bias(scaled, bias + first, count);
  store(out + first, scaled, count);
}

// R rows times B blocks of 64 outputs.
template <typename T, int R, int B = 1>
void multiply_coarsely(const CoarseRows& x, int64_t row, const char* packed, const T* bias, T* out, int64_t out_stride,
                       int64_t outputs) {
  int64_t steps = x.width / 2, bytes = coarse_block_bytes(x.width);
  f32x16 totals[R][4 * B] = {};
  for (int64_t begin = 0; begin < steps; begin += EXACT) {
    i32x16 sums[R][4 * B] = {};
    for (int64_t k = begin; k < std::min(steps, begin + EXACT); ++k) {
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b) {
        const int8_t* here = (const int8_t*)packed + b * bytes + BLOCK * sizeof(float) + k * BLOCK * 2;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          CoarseWeights w(here + i * LANES * 2);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) w.add(sums[r][b * 4 + i], x.words.data() + (row + r) * x.width + k * 2);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 4 * B; ++i) totals[r][i] += __builtin_convertvector(sums[r][i], f32x16);
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 4 * B; ++i) {
      int64_t skipped = i / 4 * BLOCK;  // outputs of the block before
      store_scaled(totals[r][i], packed + i / 4 * bytes, x.scales[row + r], bias ? bias + skipped : nullptr,
                   out + r * out_stride + skipped, i % 4 * LANES, outputs - skipped);
    }
}

template <typename T>
void multiply_coarse_rows(int64_t rows, const CoarseRows& x, int64_t row, const char* w, const T* bias, T* out, int64_t stride,
                          int64_t outputs) {
  switch (rows) {
    case 1: return multiply_coarsely<T, 1>(x, row, w, bias, out, stride, outputs);
    case 2: return multiply_coarsely<T, 2>(x, row, w, bias, out, stride, outputs);
    case 3: return multiply_coarsely<T, 3>(x, row, w, bias, out, stride, outputs);
    case 4: return multiply_coarsely<T, 4>(x, row, w, bias, out, stride, outputs);
    case 5: return multiply_coarsely<T, 5>(x, row, w, bias, out, stride, outputs);
  }
}

#if EAGLE_TILES
constexpr int64_t FEW_ROWS = 8;

// Many rows go by tiles: a weight in 8 bits is one in bfloat16 too. Inputs are as they came then, so a row's bits are others than
// among few; drafts may differ by that.
template <typename F>
void multiply_many_coarsely(const uint16_t* x, int64_t rows, int64_t width, const char* packed, const uint16_t* bias,
                            int64_t outputs, int64_t begin, int64_t end, std::vector<uint16_t>& local, const F& use) {
  alignas(64) float sums[TILE_ROWS * BLOCK];
  int64_t bytes = coarse_block_bytes(width);
  std::vector<uint16_t> wide(width * BLOCK);
  local.resize(rows * BLOCK);
  Tiles tiles;
  for (int64_t block = begin; block < end; ++block) {
    const char* here = packed + block * bytes;
    const int8_t* words = (const int8_t*)here + BLOCK * sizeof(float);
#pragma GCC ivdep
    for (int64_t i = 0; i < width * BLOCK; ++i) wide[i] = uint16_t(std::bit_cast<uint32_t>(float(words[i])) >> 16);
    int64_t first = block * BLOCK, count = std::min(BLOCK, outputs - first);
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
      int64_t size = std::min(TILE_ROWS, rows - row);
      tiles.shape(size);
      multiply_tiles<2>(x + row * width, width, wide.data(), width, sums, here + bytes, 0);
      for (int64_t m = 0; m < size; ++m)
        for (int64_t at = 0; at < BLOCK; at += LANES)
          store_scaled(load16(sums + m * BLOCK + at), here, 1.0f, bias ? bias + first : nullptr, local.data() + (row + m) * BLOCK, at,
                       count);
    }
    use(first, local.data(), BLOCK, count);
  }
}
#endif

// As `multiply_blocks`.
template <typename T, typename F>
void multiply_coarse_blocks(const T* inputs, int64_t rows, int64_t width, const char* packed, const T* bias, int64_t outputs,
                            int64_t begin, int64_t end, std::vector<T>& local, const F& use) {
  constexpr int64_t TOGETHER = 5;  // rows: 20 vectors of sums, and their weights
  if (!rows) return;
#if EAGLE_TILES
  if constexpr (sizeof(T) == 2)
    if (rows > FEW_ROWS && width % TILE_DEPTH == 0 && tiles_granted())
      return multiply_many_coarsely(inputs, rows, width, packed, bias, outputs, begin, end, local, use);
#endif
  CoarseRows x(inputs, rows, width);
  int64_t bytes = coarse_block_bytes(width);
  local.resize(rows * 2 * BLOCK);
  for (int64_t block = begin; block < end;) {
    const char* w = packed + block * bytes;
    int64_t first = block * BLOCK, together = rows <= 2 && block + 1 < end ? 2 : 1;
    int64_t count = std::min(together * BLOCK, outputs - first), stride = together * BLOCK;
    const T* added = bias ? bias + first : nullptr;
    if (together == 2) {
      if (rows == 1) multiply_coarsely<T, 1, 2>(x, 0, w, added, local.data(), stride, count);
      else multiply_coarsely<T, 2, 2>(x, 0, w, added, local.data(), stride, count);
    } else {
      for (int64_t row = 0; row < rows; row += TOGETHER)
        multiply_coarse_rows<T>(std::min(TOGETHER, rows - row), x, row, w, added, local.data() + row * stride, stride, count);
    }
    use(first, local.data(), stride, count);
    block += together;
  }
}

// Weights [N, K] in 8 bits: a block of bytes for every 64 outputs.
inline Tensor pack_coarsely(const Tensor& weight) {
  Tensor w = weight.contiguous();
  int64_t outputs = w.size(0), width = w.size(1), blocks = (outputs + BLOCK - 1) / BLOCK, bytes = coarse_block_bytes(width);
  TORCH_CHECK(width % 2 == 0, "weights come in pairs, not ", width, " an output");
  TORCH_CHECK(w.scalar_type() == at::kFloat || w.scalar_type() == at::kBFloat16, "weights are float32 or bfloat16");
  Tensor out = empty_weights(blocks * bytes, w.options().dtype(at::kByte));
  char* to = (char*)out.mutable_data_ptr();
  auto run = [&](const auto* from) {
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      std::vector<int8_t> units(width);
      for (int64_t block = begin; block < end; ++block) {
        float* scales = (float*)(to + block * bytes);
        int8_t* words = (int8_t*)(scales + BLOCK);
        for (int64_t n = 0; n < BLOCK; ++n) {
          int64_t row = block * BLOCK + n;
          scales[n] = 0;
          if (row < outputs) scales[n] = in_units(from + row * width, width, LARGEST_WEIGHT, units.data());
          else std::fill(units.begin(), units.end(), int8_t(0));
          for (int64_t k = 0; k < width; ++k) words[(k / 2 * BLOCK + n) * 2 + k % 2] = units[k];
        }
      }
    });
  };
  if (w.scalar_type() == at::kFloat) run(w.const_data_ptr<float>());
  else run((const uint16_t*)w.const_data_ptr());
  return out;
}

// Whether multiplying so is faster than by the weights as they are, where there are few rows.
inline bool coarse_pays() {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  return true;
#else
  return false;
#endif
}

// x [M, K] times weights that were packed so: [M, N].
inline Tensor coarse_linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs) {
  Tensor x = input.contiguous();
  TORCH_CHECK(x.dim() == 2 && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16),
              "inputs are rows of float32 or bfloat16");
  TORCH_CHECK(!bias || (bias->scalar_type() == x.scalar_type() && bias->numel() == outputs), "no such bias");
  int64_t rows = x.size(0), width = x.size(1), blocks = (outputs + BLOCK - 1) / BLOCK;
  TORCH_CHECK(is_coarse(packed) && blocks * coarse_block_bytes(width) == packed.numel(), "rows of ", width,
              " numbers do not fit weights of ", packed.numel(), " bytes for ", outputs, " outputs");
  Tensor out = at::empty({rows, outputs}, x.options());
  auto run = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    const T* added = bias ? (const T*)bias->const_data_ptr() : nullptr;
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      std::vector<T> local;
      multiply_coarse_blocks((const T*)x.const_data_ptr(), rows, width, (const char*)packed.const_data_ptr(), added, outputs, begin,
                             end, local, [&](int64_t first, const T* from, int64_t stride, int64_t count) {
                               for (int64_t m = 0; m < rows; ++m)
                                 std::memcpy(to + m * outputs + first, from + m * stride, count * sizeof(T));
                             });
    });
  };
  if (x.scalar_type() == at::kFloat) run(out.mutable_data_ptr<float>());
  else run((uint16_t*)out.mutable_data_ptr());
  return out;
}

// By weights in whichever precision they were packed.
inline Tensor linear_of(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs) {
  return is_coarse(packed) ? coarse_linear(x, packed, bias, outputs) : linear(x, packed, bias, outputs);
}

}  // namespace eagle
