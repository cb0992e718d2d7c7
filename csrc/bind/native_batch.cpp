// Many chunks of one size in one call: what a chunk costs here is two numbers read from an array.
#include <vector>

#include "bind/native_bind.hpp"
#include "runtime/failure.hpp"

namespace expertwire::bind {

std::shared_ptr<PyRequest> submit_batch(const PyContext& self, std::uint32_t rank, const std::string& kind,
                                        std::uint32_t local, std::uint32_t remote, std::uint64_t bytes,
                                        const OffsetArray& offsets, const OffsetArray& remote_offsets,
                                        std::uint32_t lane, std::int64_t timeout_ms) {
    runtime::Context& context = *self.context;
    context.check_usable();
    const OpKind op = parse_kind(kind);
    const std::span<const std::uint64_t> from(offsets.data(), offsets.shape(0));
    const std::span<const std::uint64_t> to(remote_offsets.data(), remote_offsets.shape(0));
    const nanobind::gil_scoped_release release;
    const std::vector<ChunkSpec> chunks =
        context.chunks(rank, op, RegionId{local}, from, RemoteRegionId{remote}, to, bytes, lane);
    return submit_specs(self, rank, chunks, {}, true, timeout_ms);
}

}  // namespace expertwire::bind
