// The part of `_native.Context` that is about peers: how they are reached, what they announced, what is mapped here.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "bind/native_bind.hpp"
#include "runtime/blob.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace expertwire::bind {

namespace {

void bind_peers_regions(nb::class_<PyContext>& cls) {
    using Self = const PyContext&;
    using Release = nb::call_guard<nb::gil_scoped_release>;
    cls.def(
           "map_peer",
           [](Self self, std::uint32_t rank, const std::string& region, int fd) {
               self.context->map_peer(rank, region, fd);
           },
           "rank"_a, "region"_a, "fd"_a, Release(),
           "Map a node peer's region of that name; the descriptor is only borrowed. Map 'runtime' too: its doorbell "
           "is there.")
        .def(
            "peer_address",
            [](Self self, std::uint32_t rank, const std::string& region) {
                return reinterpret_cast<std::uintptr_t>(self.context->peer_memory(rank, region));
            },
            "rank"_a, "region"_a, Release(), "Where it is mapped here; 0 if it is not.")
        .def(
            "remote_region",
            [](Self self, std::uint32_t rank, const std::string& region) {
                return self.context->remote_region(rank, region).value;
            },
            "rank"_a, "region"_a, Release(), "The number under which submit() knows a peer's region.")
        .def(
            "remote_region_bytes",
            [](Self self, std::uint32_t rank, const std::string& region) {
                return self.context->remote_region_bytes(rank, region);
            },
            "rank"_a, "region"_a, Release(), "The size that the peer announced.");
}

}  // namespace

void bind_peers(nb::class_<PyContext>& cls) {
    using Self = const PyContext&;
    using Release = nb::call_guard<nb::gil_scoped_release>;
    cls.def(
           "blob",
           [](Self self, bool own_only) {
               std::vector<std::byte> blob;
               {
                   nb::gil_scoped_release release;
                   blob = self.context->blob(own_only);
               }
               return nb::bytes(blob.data(), blob.size());
           },
           "own_only"_a = false,
           "What the bootstrap carries to every rank: address, regions with keys, pid and start time. Versioned, "
           "binary.\n"
           "own_only: without the users' regions, which region_key() and announce_region() carry.")
        .def(
            "add_peer",
            [](Self self, std::uint32_t rank, nb::bytes blob, std::optional<std::uint32_t> place) {
                const auto* data = static_cast<const std::byte*>(blob.data());
                const std::size_t bytes = blob.size();
                nb::gil_scoped_release release;
                self.context->add_peer(rank, {data, bytes}, place);
            },
            "rank"_a, "blob"_a, "place"_a.none() = nb::none(),
            "Make the rank reachable and watch whether it lives. Again with a newer blob of the same process: adds "
            "regions.\n"
            "place: of an independent context, the number that the peer gives it.\n"
            "Raises InvalidArgumentError (rank, malformed blob), MismatchError (version, rank, size, provider).")
        .def(
            "announce_region",
            [](Self self, std::uint32_t rank, const std::string& name, std::uint64_t bytes, nb::bytes key) {
                runtime::BlobRegion region{name, bytes, {}};
                const auto* data = static_cast<const std::byte*>(key.data());
                region.key.assign(data, data + key.size());
                nb::gil_scoped_release release;
                return self.context->announce_region(rank, region).value;
            },
            "rank"_a, "name"_a, "bytes"_a, "key"_a,
            "The peer's region of that name has that size and key (its region_key()); the number under which submit() "
            "knows it.")
        .def(
            "remove_peer", [](Self self, std::uint32_t rank) { self.context->remove_peer(rank); }, "rank"_a, Release(),
            "Its requests fail, its lanes close; add_peer may follow.");
    bind_peers_regions(cls);
}

}  // namespace expertwire::bind
