#include "rows/rows.hpp"

#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace expertwire::rows {

namespace {

constexpr std::size_t kLine = 64;

#if defined(__x86_64__)
// Baseline SSE2 is enough: what limits a streaming copy is memory, not the width of a store.
void stream(std::byte* to, const std::byte* from, std::size_t bytes) {
    const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
    if (head > 0) {
        std::memcpy(to, from, head);
        to += head;
        from += head;
        bytes -= head;
    }
    const std::size_t lines = bytes / kLine;
    for (std::size_t line = 0; line < lines; ++line, to += kLine, from += kLine) {
        const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16));
        const __m128i c = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 32));
        const __m128i d = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 48));
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), a);
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + 16), b);
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + 32), c);
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + 48), d);
    }
    if (bytes % kLine > 0) std::memcpy(to, from, bytes % kLine);
}
#endif

}  // namespace

void copy(std::byte* to, const std::byte* from, std::size_t bytes, Store store) {
#if defined(__x86_64__)
    if (store == Store::streaming && bytes >= 4 * kLine) {
        stream(to, from, bytes);
        return;
    }
#else
    static_cast<void>(store);
#endif
    if (bytes > 0) std::memcpy(to, from, bytes);
}

void fence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

namespace {

template <class Index>
LayoutError count(const Index* ids, std::uint64_t tokens, std::uint32_t topk, const std::uint64_t* expert_first,
                  std::uint32_t ranks, const std::uint32_t* node_of, std::uint32_t nodes, const std::uint32_t* owner,
                  const LayoutCounts& out) {
    const std::uint64_t experts = expert_first[ranks];
    std::memset(out.per_rank, 0, ranks * sizeof(std::int32_t));
    if (out.per_node != nullptr) std::memset(out.per_node, 0, nodes * sizeof(std::int32_t));
    if (experts > 0) std::memset(out.per_expert, 0, experts * sizeof(std::int32_t));
    if (tokens > 0) std::memset(out.in_rank, 0, tokens * ranks);
    std::vector<std::uint64_t> node_seen(nodes, 0);  // the token, plus one, that was last counted for the node
    for (std::uint64_t token = 0; token < tokens; ++token) {
        std::uint8_t* const present = out.in_rank + token * ranks;
        for (std::uint32_t slot = 0; slot < topk; ++slot) {
            const Index id = ids[token * topk + slot];
            if (id == -1) continue;
            if (id < 0 || static_cast<std::uint64_t>(id) >= experts) return {true, token, slot, id};
            ++out.per_expert[id];
            const std::uint32_t rank = owner[id];
            if (present[rank]) continue;
            present[rank] = 1;
            ++out.per_rank[rank];
            if (out.per_node == nullptr || node_seen[node_of[rank]] == token + 1) continue;
            node_seen[node_of[rank]] = token + 1;
            ++out.per_node[node_of[rank]];
        }
    }
    return {};
}

}  // namespace

LayoutError count_layout(const void* topk_idx, std::uint32_t index_bytes, std::uint64_t tokens, std::uint32_t topk,
                         const std::uint64_t* expert_first, std::uint32_t ranks, const std::uint32_t* node_of,
                         std::uint32_t nodes, const LayoutCounts& out) {
    std::vector<std::uint32_t> owner(expert_first[ranks]);
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        for (std::uint64_t expert = expert_first[rank]; expert < expert_first[rank + 1]; ++expert) owner[expert] = rank;
    }
    if (index_bytes == 4) {
        return count(static_cast<const std::int32_t*>(topk_idx), tokens, topk, expert_first, ranks, node_of, nodes,
                     owner.data(), out);
    }
    return count(static_cast<const std::int64_t*>(topk_idx), tokens, topk, expert_first, ranks, node_of, nodes,
                 owner.data(), out);
}

}  // namespace expertwire::rows
