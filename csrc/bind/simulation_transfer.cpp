// _simulation.TransferNetwork: engines and their providers over one simulated network, as endpoints of agents: each
// numbers its peers as it likes, and registers memory of its caller's. Driven step by step by expertwire.testing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bind/simulation_bind.hpp"
#include "engine/engine.hpp"
#include "engine/pump.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace expertwire {
namespace {

constexpr std::uint32_t endpoints_first = 0, endpoints_after = 16;

template <class Value>
using Column = nb::ndarray<const Value, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct Place {
    std::unique_ptr<Engine> engine;
    std::map<std::uint32_t, std::vector<QueuePairId>> lanes;  // by the number that this one gave a peer
    std::vector<Arrival> arrivals;
    std::map<std::uint64_t, std::vector<std::byte>> payloads;  // of requests that live
    std::uint32_t next_endpoint = endpoints_after;
    std::uint32_t refused_turns = 0;  // one after the other in which the network pushed back
};

class TransferNetwork {
  public:
    TransferNetwork(std::uint64_t seed, std::uint32_t places, std::uint32_t peers_max, std::uint32_t operations_max,
                    std::uint32_t regions_max, const nb::dict& faults)
        : random_(seed),
          network_(places, model_of(random_), network_faults_of(faults), random_.next()),
          places_(places),
          regions_max_(regions_max) {
        EngineLimits limits;
        limits.peers_max = peers_max;
        limits.queue_pairs_max = peers_max * lanes;
        limits.queue_pairs_per_peer_max = lanes;
        limits.outstanding_max = static_cast<std::uint32_t>(random_.between(2, 24));
        limits.requests_max = 512;
        limits.queued_max = operations_max;
        limits.regions_max = regions_max;
        limits.hard_timeout_ns = 400'000;
        for (Place& place : places_) place.engine = std::make_unique<Engine>(limits, GatePolicy{});
    }

    static constexpr std::uint32_t lanes = 2;

    bool register_region(std::uint32_t place, std::uint32_t region, std::uintptr_t address, std::uint64_t bytes) {
        RegionSpec spec;
        spec.address = reinterpret_cast<std::byte*>(address);
        spec.bytes = bytes;
        return region < regions_max_ && provider(place).register_region(RegionId{region}, spec).ok();
    }
    bool deregister_region(std::uint32_t place, std::uint32_t region) {
        if (at(place).engine->region_uses(RegionId{region}) > 0) return false;
        return provider(place).deregister_region(RegionId{region}).ok();
    }
    nb::bytes region_key(std::uint32_t place, std::uint32_t region) {
        const auto key = provider(place).region_key(RegionId{region});
        return nb::bytes(reinterpret_cast<const char*>(key.data()), key.size());
    }

    bool add_peer(std::uint32_t place, std::uint32_t number, std::uint32_t there) {
        Place& own = at(place);
        if (own.lanes.contains(number)) return true;
        if (!provider(place).add_peer(PeerId{number}, provider(there).address(EndpointId{0})).ok()) return false;
        std::vector<QueuePairId> opened;
        for (std::uint32_t lane = 0; lane < lanes; ++lane) {
            opened.push_back(own.engine->open_queue_pair(PeerId{number}, EndpointId{current(own) + lane}));
            if (!opened.back().valid()) return false;
        }
        own.lanes[number] = opened;
        return true;
    }
    // Everything on its way to it ends.
    bool remove_peer(std::uint32_t place, std::uint32_t number) {
        Place& own = at(place);
        if (own.lanes.erase(number) == 0) return true;
        static_cast<void>(provider(place).remove_peer(PeerId{number}));
        own.engine->on_peer_closed(PeerId{number}, network_.now());
        return own.engine->close_peer(PeerId{number}, network_.now()) == Status::ok;
    }
    void declare_dead(std::uint32_t place, std::uint32_t number) {
        at(place).engine->on_peer_dead(PeerId{number}, network_.now());
    }
    bool announce(std::uint32_t place, std::uint32_t number, std::uint32_t remote, const nb::bytes& key) {
        const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(key.c_str()), key.size());
        return provider(place).add_remote_region(PeerId{number}, RemoteRegionId{remote}, bytes).ok();
    }

    // (status, ticket): 2, would_block, where there is no room.
    nb::tuple submit(std::uint32_t place, std::uint32_t number, bool read, const Column<std::uint32_t>& locals,
                     const Column<std::uint64_t>& offsets, const Column<std::uint32_t>& remotes,
                     const Column<std::uint64_t>& remote_offsets, const Column<std::uint64_t>& bytes,
                     const nb::bytes& notification, std::uint32_t lane) {
        Place& own = at(place);
        const auto found = own.lanes.find(number);
        if (found == own.lanes.end()) return nb::make_tuple(static_cast<int>(Status::closed), 0);
        std::vector<ChunkSpec> chunks(bytes.shape(0));
        for (std::size_t i = 0; i < chunks.size(); ++i)
            chunks[i] = {found->second[lane % lanes],
                         read ? OpKind::read : OpKind::write,
                         RegionId{locals.data()[i]},
                         offsets.data()[i],
                         RemoteRegionId{remotes.data()[i]},
                         remote_offsets.data()[i],
                         bytes.data()[i]};
        const auto* first = reinterpret_cast<const std::byte*>(notification.c_str());
        std::vector<std::byte> payload(first, first + notification.size());
        std::vector<ControlSpec> controls;
        if (!payload.empty()) {
            ControlSpec spec;
            spec.kind = OpKind::notification;
            spec.queue_pair = found->second[0];
            spec.payload = payload.data();
            spec.bytes = payload.size();
            controls.push_back(spec);
        }
        const Engine::Submitted submitted =
            own.engine->submit(PeerId{number}, chunks, controls, Level::delivered, network_.now());
        if (submitted.status == Status::ok) own.payloads[submitted.request.pack()] = std::move(payload);
        return nb::make_tuple(static_cast<int>(submitted.status), submitted.request.pack());
    }
    int status(std::uint32_t place, std::uint64_t ticket) {
        return static_cast<int>(at(place).engine->status(Ticket::unpack(ticket)));
    }
    int error_code(std::uint32_t place, std::uint64_t ticket) {
        return at(place).engine->error_code(Ticket::unpack(ticket));
    }
    bool cancel(std::uint32_t place, std::uint64_t ticket) {
        return at(place).engine->cancel(Ticket::unpack(ticket)) == Status::ok;
    }
    bool release(std::uint32_t place, std::uint64_t ticket) {
        if (at(place).engine->release(Ticket::unpack(ticket)) == Status::refused) return false;
        at(place).payloads.erase(ticket);
        return true;
    }

    nb::list take_notifications(std::uint32_t place) {
        nb::list taken;
        for (const Arrival& arrival : at(place).arrivals)
            taken.append(nb::make_tuple(
                arrival.peer.value,
                nb::bytes(reinterpret_cast<const char*>(arrival.payload.data()), arrival.payload.size())));
        at(place).arrivals.clear();
        return taken;
    }

    // A turn of every place that lives, in part, and then time goes on. The first rule that does not hold, or "".
    std::string step() {
        for (std::uint32_t index = 0; index < places_.size(); ++index) {
            if (network_.dead(index) || !random_.chance(0.8)) continue;
            Place& place = places_[index];
            const PumpResult pumped = pump(*place.engine, network_.provider(index), place.arrivals, network_.now(), 2);
            place.refused_turns = pumped.again > 0 ? place.refused_turns + 1 : 0;
            replace_where_needed(index);
            const std::string broken = place.engine->check_invariants();
            if (!broken.empty()) return "place " + std::to_string(index) + ": " + broken;
        }
        advance();
        return {};
    }
    void heal() { network_.set_faults({}); }
    void kill(std::uint32_t place, bool reported) { network_.kill(place, reported); }
    std::uint64_t now() const { return network_.now(); }
    std::uint64_t trace_hash() const { return network_.trace_hash(); }
    std::uint64_t posts() const { return network_.posts(); }
    nb::dict faults() const {
        nb::dict found;
        for (std::size_t i = 0; i < network_faults; ++i) {
            const auto fault = static_cast<NetworkFault>(i);
            if (network_.count(fault) > 0) found[name_of(fault)] = network_.count(fault);
        }
        return found;
    }

  private:
    static NetworkModel model_of(Random& random) {
        NetworkModel model;
        model.transmit_queue = static_cast<std::uint32_t>(random.between(2, 64));
        if (random.chance(0.3)) model.rendezvous_bytes = random.between(64, 4096);
        return model;
    }
    Place& at(std::uint32_t place) {
        if (place >= places_.size()) throw nb::index_error("no such place");
        return places_[place];
    }
    SimulatedProvider& provider(std::uint32_t place) {
        at(place);
        return network_.provider(place);
    }
    static std::uint32_t current(const Place& place) {
        return place.next_endpoint == endpoints_after ? endpoints_first : place.next_endpoint;
    }
    // At once, as where an endpoint is lost: what it held ends.
    void replace_where_needed(std::uint32_t index) {
        Place& place = places_[index];
        std::optional<EndpointId> full = place.engine->endpoint_to_replace();
        if (!full) full = quarantined(place);
        if (!full) return;
        place.next_endpoint += lanes;
        place.engine->replace_endpoint(*full, EndpointId{place.next_endpoint + full->value % lanes});
        network_.provider(index).close_endpoint(*full);
        place.engine->on_endpoint_closed(*full, network_.now());
    }
    // Of an operation whose completion was lost: whoever removes a peer has it replaced, however few there are.
    static std::optional<EndpointId> quarantined(const Place& place) {
        for (const auto& [number, queue_pairs] : place.lanes)
            for (const QueuePairId queue_pair : queue_pairs) {
                const QueuePairView view = place.engine->view(queue_pair);
                if (view.state == LaneState::quarantined) return view.endpoint;
            }
        return std::nullopt;
    }
    void advance() {
        TimeNs next = network_.now() + random_.between(1, 2'000);
        bool busy = network_.next_event().has_value();
        std::optional<TimeNs> soonest;
        for (std::uint32_t index = 0; index < places_.size(); ++index) {
            if (network_.dead(index)) continue;
            busy = busy || (places_[index].refused_turns > 0 && places_[index].refused_turns <= 100);
            const std::optional<TimeNs> deadline = places_[index].engine->next_deadline();
            if (deadline && (!soonest || *deadline < *soonest)) soonest = deadline;
        }
        if (!busy && soonest && *soonest > next) next = *soonest;
        network_.run_until(next);
    }

    Random random_;
    SimulatedNetwork network_;
    std::vector<Place> places_;
    std::uint32_t regions_max_;
};

}  // namespace

void bind_transfer_simulation(nb::module_& module) {
    nb::class_<TransferNetwork>(module, "TransferNetwork", "Endpoints of agents over one simulated network.")
        .def(nb::init<std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, const nb::dict&>(),
             "seed"_a, "places"_a, "peers_max"_a, "operations_max"_a, "regions_max"_a, "faults"_a)
        .def("register_region", &TransferNetwork::register_region, "place"_a, "region"_a, "address"_a, "bytes"_a)
        .def("deregister_region", &TransferNetwork::deregister_region, "place"_a, "region"_a,
             "False while a request of this place uses it.")
        .def("region_key", &TransferNetwork::region_key, "place"_a, "region"_a)
        .def("add_peer", &TransferNetwork::add_peer, "place"_a, "number"_a, "there"_a)
        .def("remove_peer", &TransferNetwork::remove_peer, "place"_a, "number"_a)
        .def("declare_dead", &TransferNetwork::declare_dead, "place"_a, "number"_a)
        .def("announce", &TransferNetwork::announce, "place"_a, "number"_a, "remote"_a, "key"_a)
        .def("submit", &TransferNetwork::submit, "place"_a, "number"_a, "read"_a, "locals"_a, "offsets"_a, "remotes"_a,
             "remote_offsets"_a, "bytes"_a, "notification"_a, "lane"_a, "(status, ticket).")
        .def("status", &TransferNetwork::status, "place"_a, "ticket"_a)
        .def("error_code", &TransferNetwork::error_code, "place"_a, "ticket"_a)
        .def("cancel", &TransferNetwork::cancel, "place"_a, "ticket"_a)
        .def("release", &TransferNetwork::release, "place"_a, "ticket"_a)
        .def("take_notifications", &TransferNetwork::take_notifications, "place"_a, "[(place of its sender, bytes)].")
        .def("step", &TransferNetwork::step, "One turn; what of the engine's rules does not hold, or \"\".")
        .def("heal", &TransferNetwork::heal, "No faults from here on.")
        .def("kill", &TransferNetwork::kill, "place"_a, "reported"_a)
        .def_prop_ro("now", &TransferNetwork::now, "Virtual ns.")
        .def_prop_ro("trace_hash", &TransferNetwork::trace_hash)
        .def_prop_ro("posts", &TransferNetwork::posts)
        .def_prop_ro("faults", &TransferNetwork::faults, "How often each kind has struck.");
}

}  // namespace expertwire
