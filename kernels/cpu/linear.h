// Linear layers of a few rows over packed weights.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <vector>

#include <sys/mman.h>

#include "numbers.h"
#include "tiles.h"

namespace eagle {

using at::Tensor;

constexpr int64_t BLOCK = 4 * LANES;  // outputs packed together
constexpr int64_t ROWS = 7;           // rows multiplied at a time: 28 vectors of sums, 4 of weights

// One step of a dot product: two bf16 weights or one fp32 weight for each of 16 outputs, times one row's inputs.
template <typename T>
struct Step;

template <>
struct Step<uint16_t> {
  static constexpr int64_t DEPTH = 2;
#if defined(__AVX512BF16__)
  using Weights = __m512bh;
  static Weights load(const uint16_t* w) { return (__m512bh)_mm512_loadu_si512(w); }
  static void add(f32x16& sum, Weights w, const uint16_t* x) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    sum = (f32x16)_mm512_dpbf16_ps((__m512)sum, w, (__m512bh)_mm512_set1_epi32(pair));
  }
#else
  using Weights = u32x16;
  static Weights load(const uint16_t* w) {
    Weights v;
    std::memcpy(&v, w, 64);
    return v;
  }
  static void add(f32x16& sum, Weights w, const uint16_t* x) {
    sum = fused(std::bit_cast<f32x16>(w << 16), f32x16{} + widen(x[0]), sum);
    sum = fused(std::bit_cast<f32x16>(w & 0xffff0000u), f32x16{} + widen(x[1]), sum);
  }
#endif
};

template <>
struct Step<float> {
  static constexpr int64_t DEPTH = 1;
  using Weights = f32x16;
  static Weights load(const float* w) {
    Weights v;
    std::memcpy(&v, w, 64);
    return v;
  }
  static void add(f32x16& sum, Weights w, const float* x) { sum = fused(w, f32x16{} + *x, sum); }
};

// What to fetch from memory while multiplying by weights that are in L2: every step a piece of so many bytes.
struct Fetch {
  const char* from = nullptr;
  int64_t piece = 0, stride = 0;

  void step(int64_t k) const {
    for (int64_t byte = 0; byte < piece; byte += 64) __builtin_prefetch(from + k * stride + byte, 0, 2);
  }
};

template <typename T>
void add_bias(f32x16& sum, const T* bias, int64_t count) {
  if (count == LANES) sum += load16(bias);
  else
    for (int64_t i = 0; i < count; ++i) sum[i] += as_float(bias[i]);
}

// R rows times B blocks of 64 outputs.
template <typename T, int R, int B = 1>
void multiply(const T* x, int64_t stride, const T* w, int64_t steps, const T* bias, T* out, int64_t out_stride,
              int64_t outputs, const Fetch& fetch = {}) {
  using S = Step<T>;
  f32x16 sums[R][4 * B] = {};
  for (int64_t k = 0; k < steps; ++k) {
    fetch.step(k);
    typename S::Weights v[4 * B];
    for (int b = 0; b < B; ++b) {
      const T* here = w + (b * steps + k) * BLOCK * S::DEPTH;
      for (int i = 0; i < 4; ++i) v[b * 4 + i] = S::load(here + i * LANES * S::DEPTH);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int b = 0; b < 4 * B; ++b) S::add(sums[r][b], v[b], x + r * stride + k * S::DEPTH);
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < 4 * B; ++b) {
      int64_t count = std::min(LANES, outputs - b * LANES);
      if (count <= 0) break;
      if (bias) add_bias(sums[r][b], bias + b * LANES, count);
      store(out + r * out_stride + b * LANES, sums[r][b], count);
    }
}

template <typename T>
void multiply_rows(int64_t rows, const T* x, int64_t stride, const T* w, int64_t steps, const T* bias, T* out,
                   int64_t out_stride, int64_t outputs, const Fetch& fetch) {
  switch (rows) {
    case 1: return multiply<T, 1>(x, stride, w, steps, bias, out, out_stride, outputs, fetch);
    case 2: return multiply<T, 2>(x, stride, w, steps, bias, out, out_stride, outputs, fetch);
    case 3: return multiply<T, 3>(x, stride, w, steps, bias, out, out_stride, outputs, fetch);
    case 4: return multiply<T, 4>(x, stride, w, steps, bias, out, out_stride, outputs, fetch);
    case 5: return multiply<T, 5>(x, stride, w, steps, bias, out, out_stride, outputs, fetch);
    case 6: return multiply<T, 6>(x, stride, w, steps, bias, out, out_stride, outputs, fetch);
    case 7: return multiply<T, 7>(x, stride, w, steps, bias, out, out_stride, outputs, fetch);
  }
}

// All rows times one block, in parts of like size. Parts behind the first find the weights in L2, so that memory would idle
// meanwhile: where another block follows, each part fetches its share of it. Some cores gain by it where there is but one
// part too: on Intel's, which do not look far ahead by themselves, four rows take two thirds of the time.
template <typename T>
void multiply_block(const T* x, int64_t rows, int64_t stride, const T* w, int64_t steps, const T* bias, T* out,
                    int64_t out_stride, int64_t outputs, bool followed) {
  constexpr int64_t STEP = BLOCK * Step<T>::DEPTH * sizeof(T);  // bytes
  int64_t parts = (rows + ROWS - 1) / ROWS, row = 0;
  for (int64_t part = 0; part < parts; ++part) {
    int64_t size = (rows - row + parts - part - 1) / (parts - part);
    Fetch fetch;
    if (followed) fetch = {(const char*)w + steps * STEP + part * STEP / parts, STEP / parts, STEP};
    multiply_rows<T>(size, x + row * stride, stride, w, steps, bias, out + row * out_stride, out_stride, outputs, fetch);
    row += size;
  }
}

#if EAGLE_TILES
// The same by tiles. Their loads alone do not keep memory busy: a single part fetches its weights from three steps ahead.
inline void multiply_block_by_tiles(Tiles& tiles, const uint16_t* x, int64_t rows, int64_t width, const uint16_t* w,
                                    const uint16_t* bias, uint16_t* out, int64_t out_stride, int64_t outputs) {
  constexpr int64_t STEP = BLOCK * TILE_DEPTH * sizeof(uint16_t), AHEAD = 3 * STEP;  // bytes
  alignas(64) float sums[TILE_ROWS * BLOCK];
  int64_t parts = (rows + TILE_ROWS - 1) / TILE_ROWS, row = 0;
  for (int64_t part = 0; part < parts; ++part) {
    int64_t size = (rows - row + parts - part - 1) / (parts - part);
    const uint16_t* from = x + row * width;
    tiles.shape(size);
    if (parts == 1) {
      multiply_tiles<1>(from, width, w, width, sums, (const char*)w + AHEAD, STEP);
    } else {
      int64_t piece = STEP / parts / 64 * 64;
      multiply_tiles<2>(from, width, w, width, sums, (const char*)w + width / TILE_DEPTH * (STEP + part * piece), piece);
    }
    for (int64_t m = 0; m < size; ++m)
      for (int64_t at = 0; at < outputs; at += LANES) {
        int64_t count = std::min(LANES, outputs - at);
        f32x16 sum = load16(sums + m * BLOCK + at);
        if (bias) add_bias(sum, bias + at, count);
        store(out + (row + m) * out_stride + at, sum, count);
      }
    row += size;
  }
}
#endif

// All rows times blocks `begin` to `end`: `use(first, out, stride, count)` takes `count` outputs of every row from the first on.
// Some blocks are taken two at a time: one or two rows give a single one too few sums to hide their latency.
template <typename T, typename F>
void multiply_blocks(const T* x, int64_t rows, int64_t width, const T* packed, const T* bias, int64_t outputs, int64_t begin,
                     int64_t end, std::vector<T>& local, const F& use) {
  int64_t steps = width / Step<T>::DEPTH;
  if (!rows) return;
  local.resize(rows * 2 * BLOCK);
#if EAGLE_TILES
  if constexpr (sizeof(T) == 2)
    if (width % TILE_DEPTH == 0 && tiles_granted()) {
      Tiles tiles;
      for (int64_t block = begin; block < end; ++block) {
        int64_t first = block * BLOCK, count = std::min(BLOCK, outputs - first);
        multiply_block_by_tiles(tiles, x, rows, width, packed + block * width * BLOCK, bias ? bias + first : nullptr, local.data(),
                                BLOCK, count);
        use(first, local.data(), BLOCK, count);
      }
      return;
    }
#endif
  for (int64_t block = begin; block < end;) {
    const T* w = packed + block * width * BLOCK;
    int64_t first = block * BLOCK, together = rows <= 2 && block + 1 < end ? 2 : 1;
    int64_t count = std::min(together * BLOCK, outputs - first), stride = together * BLOCK;
    const T* added = bias ? bias + first : nullptr;
    if (together == 2) {
      if (rows == 1) multiply<T, 1, 2>(x, width, w, steps, added, local.data(), stride, count);
      else multiply<T, 2, 2>(x, width, w, steps, added, local.data(), stride, count);
    } else {
      multiply_block(x, rows, width, w, steps, added, local.data(), stride, count, block + 1 < end);
    }
    use(first, local.data(), stride, count);
    block += together;
  }
}

template <typename T>
void linear_rows(const T* x, int64_t rows, int64_t width, const T* packed, const T* bias, T* out, int64_t outputs) {
  at::parallel_for(0, (outputs + BLOCK - 1) / BLOCK, 1, [&](int64_t begin, int64_t end) {
    std::vector<T> local;
    multiply_blocks(x, rows, width, packed, bias, outputs, begin, end, local,
                    [&](int64_t first, const T* from, int64_t stride, int64_t count) {
                      for (int64_t m = 0; m < rows; ++m)
                        std::memcpy(out + m * outputs + first, from + m * stride, count * sizeof(T));
                    });
  });
}

inline void check_width(const Tensor& x, const Tensor& packed, int64_t outputs) {
  int64_t blocks = (outputs + BLOCK - 1) / BLOCK;
  TORCH_CHECK(x.dim() > 0 && x.size(-1) * blocks * BLOCK == packed.numel() && x.scalar_type() == packed.scalar_type(),
              "rows of ", x.size(-1), " numbers do not fit weights of ", packed.numel(), " for ", outputs, " outputs");
}

// x [..., K] times packed weights of N outputs: [..., N].
inline Tensor linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs) {
  Tensor x = input.contiguous();
  check_width(x, packed, outputs);
  TORCH_CHECK(!bias || (bias->scalar_type() == x.scalar_type() && bias->numel() == outputs), "no such bias");
  auto sizes = x.sizes().vec();
  int64_t width = sizes.back(), rows = width ? x.numel() / width : 0;
  sizes.back() = outputs;
  Tensor out = at::empty(sizes, x.options());
  const void* added = bias ? bias->const_data_ptr() : nullptr;
  if (x.scalar_type() == at::kFloat) {
    linear_rows<float>(x.const_data_ptr<float>(), rows, width, packed.const_data_ptr<float>(), (const float*)added,
                       out.mutable_data_ptr<float>(), outputs);
  } else {
    linear_rows<uint16_t>((const uint16_t*)x.const_data_ptr(), rows, width, (const uint16_t*)packed.const_data_ptr(),
                          (const uint16_t*)added, (uint16_t*)out.mutable_data_ptr(), outputs);
  }
  return out;
}

template <typename T>
void pack_into(const T* w, T* out, int64_t outputs, int64_t width) {
  constexpr int64_t D = Step<T>::DEPTH;
  int64_t blocks = (outputs + BLOCK - 1) / BLOCK, steps = width / D;
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      for (int64_t k = 0; k < steps; ++k)
        for (int64_t n = 0; n < BLOCK; ++n)
          for (int64_t d = 0; d < D; ++d) {
            int64_t row = block * BLOCK + n;
            out[((block * steps + k) * BLOCK + n) * D + d] = row < outputs ? w[row * width + k * D + d] : T(0);
          }
  });
}

// Memory of huge pages that many tensors share: a matrix of its own is often smaller than one such page, and with small
// ones a core reads a third slower.
struct Arena {
  static constexpr size_t PAGE = size_t(1) << 21, SIZE = size_t(1) << 26;
  char* mapped;
  size_t bytes, used = 0;

  explicit Arena(size_t least) : bytes((std::max(least, SIZE) + PAGE - 1) / PAGE * PAGE + PAGE) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    mapped = (char*)at;
    used = (PAGE - uintptr_t(mapped) % PAGE) % PAGE;
#if defined(MADV_HUGEPAGE)
    madvise(mapped, bytes, MADV_HUGEPAGE);
#endif
  }
  ~Arena() { munmap(mapped, bytes); }
};

inline Tensor empty_weights(int64_t count, const at::TensorOptions& options) {
  static std::mutex lock;
  static std::shared_ptr<Arena> current;
  std::lock_guard<std::mutex> guard(lock);
  size_t bytes = (count * options.dtype().itemsize() + 63) / 64 * 64;
  if (!current || current->used + bytes > current->bytes) current = std::make_shared<Arena>(bytes);
  char* at = current->mapped + current->used;
  current->used += bytes;
  return at::from_blob(at, {count}, [arena = current](void*) {}, options);
}

// Weights [N, K] in the order that `linear` reads them in.
inline Tensor pack(const Tensor& weight) {
  Tensor w = weight.contiguous();
  int64_t outputs = w.size(0), width = w.size(1), blocks = (outputs + BLOCK - 1) / BLOCK;
  Tensor out = empty_weights(blocks * BLOCK * width, w.options());
  if (w.scalar_type() == at::kFloat)
    pack_into<float>(w.const_data_ptr<float>(), out.mutable_data_ptr<float>(), outputs, width);
  else
    pack_into<uint16_t>((const uint16_t*)w.const_data_ptr(), (uint16_t*)out.mutable_data_ptr(), outputs, width);
  return out;
}

}  // namespace eagle
