// Accepted rows of a KV cache moved down to a dense prefix; see kernels/compact.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>

namespace eagle {

using at::Tensor;

// In place, in a cache [2, L, slots, Hkv, S, D] whose last stride is 1: slots, lengths and count int64 [B], path int64 [B, N].
inline void compact(const Tensor& cache, const Tensor& slots, const Tensor& lengths, const Tensor& path, const Tensor& count) {
  Tensor slot = slots.contiguous(), length = lengths.contiguous(), nodes = path.contiguous(), counts = count.contiguous();
  TORCH_CHECK(cache.stride(5) == 1, "compact wants rows of D numbers side by side");
  auto to = cache.strides();
  int64_t bytes = cache.element_size(), row = to[4] * bytes;
  for (int64_t b = 0; b < slot.numel(); ++b) {
    const int64_t* from = nodes.const_data_ptr<int64_t>() + b * nodes.size(1);
    char* first = (char*)cache.data_ptr() + (slot.const_data_ptr<int64_t>()[b] * to[2] + length.const_data_ptr<int64_t>()[b] * to[4]) * bytes;
    for (int64_t part = 0; part < cache.size(0); ++part)
      for (int64_t layer = 0; layer < cache.size(1); ++layer)
        for (int64_t head = 0; head < cache.size(3); ++head) {
          char* rows = first + (part * to[0] + layer * to[1] + head * to[3]) * bytes;
          for (int64_t k = 0; k < counts.const_data_ptr<int64_t>()[b]; ++k)
            if (from[k] != k) std::memcpy(rows + k * row, rows + from[k] * row, cache.size(5) * bytes);
        }
  }
}

}  // namespace eagle
