// Accepted rows of a KV cache moved down to a dense prefix (see kernels/compact.py), and rows of other tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstring>

namespace eagle {

using at::Tensor;

// In place, in a cache [2, L, slots, Hkv, S, D] whose last stride is 1. slots, lengths, counts: of each sequence; paths: of all of
// them, one behind the other.
inline void compact(const Tensor& cache, at::IntArrayRef slots, at::IntArrayRef lengths, at::IntArrayRef counts,
                    at::IntArrayRef paths) {
  TORCH_CHECK(cache.dim() == 6 && cache.stride(5) == 1, "compact wants rows of D numbers side by side");
  TORCH_CHECK(slots.size() == lengths.size() && slots.size() == counts.size(), "a slot has no length or no path");
  auto to = cache.strides();
  int64_t bytes = cache.element_size(), row = to[4] * bytes, size = cache.size(5) * bytes;
  const int64_t* path = paths.data();
  for (size_t b = 0; b < slots.size(); path += counts[b++]) {
    TORCH_CHECK(path + counts[b] <= paths.end(), "a path is too short");
    char* first = (char*)cache.data_ptr() + (slots[b] * to[2] + lengths[b] * to[4]) * bytes;
    auto moves = [&](const auto& move) {
      for (int64_t part = 0; part < cache.size(0); ++part)
        for (int64_t layer = 0; layer < cache.size(1); ++layer)
          for (int64_t head = 0; head < cache.size(3); ++head) {
            char* rows = first + (part * to[0] + layer * to[1] + head * to[3]) * bytes;
            for (int64_t k = 0; k < counts[b]; ++k)
              if (path[k] != k) move(rows + k * row, rows + path[k] * row);
          }
    };
    // They lie far from each other, and in no cache: all are asked for before the first is waited for.
    moves([&](char* low, char* high) { __builtin_prefetch(low, 1), __builtin_prefetch(high); });
    moves([&](char* low, char* high) { std::memcpy(low, high, size); });
  }
}

// Rows of a tensor [N, w].
inline Tensor take_rows(const Tensor& x, at::IntArrayRef rows) {
  Tensor from = x.contiguous(), out = at::empty({int64_t(rows.size()), x.size(1)}, x.options());
  int64_t bytes = x.size(1) * x.element_size();
  char* to = (char*)out.mutable_data_ptr();
  for (int64_t row : rows) {
    TORCH_CHECK(0 <= row && row < x.size(0), "no row ", row, " of ", x.size(0));
    std::memcpy(to, (const char*)from.const_data_ptr() + row * bytes, bytes);
    to += bytes;
  }
  return out;
}

}  // namespace eagle
