// A context's life and its regions.
#include "runtime/context.hpp"

#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "provider/local.hpp"
#include "runtime/context_state.hpp"

namespace expertwire::runtime {

namespace {

constexpr std::uint64_t chunks_joined_max = 4;  // of bulk, in one operation
constexpr TimeNs farewell_ns = 1'000'000'000;   // how long close() waits for `leaving` to go out over the fabric
constexpr TimeNs fault_drain_ns = 300'000'000;
constexpr TimeNs destructor_drain_ns = 100'000'000;

std::uint32_t cores_allowed() {
    cpu_set_t set;
    CPU_ZERO(&set);
    // More cores than the fixed set holds: surely enough to spin on.
    if (sched_getaffinity(0, sizeof set, &set) != 0) return CPU_SETSIZE;
    return static_cast<std::uint32_t>(CPU_COUNT(&set));
}

void check_options(const ContextOptions& options) {
    const auto fail = [](const std::string& message) { throw Failure(FailureKind::invalid_argument, message); };
    const auto within = [&](const char* name, std::uint64_t value, std::uint64_t low, std::uint64_t high) {
        if (value < low || value > high)
            fail(std::string(name) + " is " + std::to_string(value) + "; it must be " + std::to_string(low) + " to " +
                 std::to_string(high));
    };
    within("size", options.size, 1, 65'536);
    if (options.rank >= options.size)
        fail("rank is " + std::to_string(options.rank) + "; it must be below size, " + std::to_string(options.size));
    within("max_outstanding", options.outstanding_max, 1, 65'536);
    within("lanes", options.lanes, 1, 64);
    within("endpoints", options.endpoints, 1, options.lanes);
    within("bulk_chunk_bytes", options.bulk_chunk_bytes, 4096, std::uint64_t{1} << 30);
    within("bulk_window", options.bulk_window, 1, 65'536);
    within("bulk_hold_us", options.bulk_hold_ns / 1000, 0, 1'000'000);
    within("requests_max", options.requests_max, 16, 1u << 20);
    within("counters", options.counters, 0, 1u << 24);
    within("regions_max", options.regions_max, 2, 65'536);
    within("remote_regions_max", options.remote_regions_max, 1, remote_rows_max);
    within("operations_max", options.operations_max, 16, 1u << 20);
    within("notifications_max", options.notifications_max, 1, 1u << 24);
    if (options.hard_timeout_ns < options.timeout_ns)
        fail("hard_timeout_ms is " + std::to_string(options.hard_timeout_ns / 1'000'000) + ", below timeout_ms, " +
             std::to_string(options.timeout_ns / 1'000'000) + "; give at least the same");
}

std::unique_ptr<Provider> open_provider(const ContextOptions& options, ContextState& state) {
    ControlResult result;
    std::unique_ptr<Provider> provider;
    if (options.provider == "local") {
        LocalOptions local;
        local.slots = 2 * options.outstanding_max;
        local.endpoints = options.endpoints;
        local.regions_max = options.regions_max;
        local.transmit_queue = std::max(options.outstanding_max, 1u);
        // A peer that maps us not only by the provider but as a node peer is rung at once, without its thread's help.
        local.landed = [&state](PeerId peer) {
            if (peer.value < state.peers.size() && state.peers[peer.value].shared.present())
                Doorbell(state.peers[peer.value].shared.doorbell()).ring();
        };
        provider = open_local(local, result);
    } else {
        LibfabricOptions fabric;
        fabric.libraries = options.libraries;
        fabric.provider = options.provider;
        fabric.source_address = options.source_address;
        fabric.domain = options.domain;
        fabric.slots = 2 * options.outstanding_max;
        fabric.signal_path = options.signal_path;
        fabric.endpoints = options.endpoints;
        fabric.settings = options.settings;
        provider = open_libfabric(fabric, result);
    }
    if (!provider)
        throw Failure(result.status == Status::refused ? FailureKind::unavailable : FailureKind::transfer,
                      "provider '" + options.provider + "' could not be opened: " + result.message +
                          "; run `expertwire doctor` for what this machine has");
    return provider;
}

EngineLimits engine_limits(const ContextOptions& options, const Capabilities& capabilities) {
    EngineLimits limits;
    const std::uint32_t lanes = options.lanes + 1;  // one of ours, for pulses and barriers
    limits.peers_max = options.size;
    limits.queue_pairs_max = options.size * lanes;
    limits.queue_pairs_per_peer_max = lanes;
    limits.outstanding_max = options.outstanding_max;
    limits.requests_max = options.requests_max;
    limits.queued_max = std::max(options.requests_max, options.operations_max);
    limits.held_max = std::max(options.requests_max, 2 * options.size);
    limits.regions_max = options.regions_max;
    limits.hard_timeout_ns = options.hard_timeout_ns;
    limits.bulk_hold_ns = options.bulk_hold_ns;
    limits.bulk_chunk_bytes = options.bulk_chunk_bytes;
    limits.bulk_post_bytes = std::min(capabilities.message_bytes_max, chunks_joined_max * options.bulk_chunk_bytes);
    return limits;
}

}  // namespace

ForkMark::ForkMark() {
    void* page = mmap(nullptr, sizeof(*word_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED || madvise(page, sizeof(*word_), MADV_WIPEONFORK) != 0)
        throw Failure(FailureKind::unavailable,
                      "mmap with MADV_WIPEONFORK failed: " + errno_text(errno) + "; Linux 4.14 or newer is needed");
    word_ = new (page) std::atomic<std::uint32_t>(1);
}

ForkMark::~ForkMark() {
    munmap(word_, sizeof(*word_));
}

ControlGuard::ControlGuard(ContextState& state) : state_(state) {
    if (state.token.take_until(now_ns() + state.options.timeout_ns)) return;
    throw Failure(FailureKind::deadline, "the progress token of rank " + std::to_string(state.options.rank) +
                                             " was not given back within " +
                                             std::to_string(state.options.timeout_ns / 1'000'000) +
                                             " ms; a thread of this process is stuck inside a call");
}

Context::Context(const ContextOptions& options) {
    check_options(options);
    state_ = std::make_unique<ContextState>(options);
    ContextState& state = *state_;
    if (getrandom(&state.instance, sizeof state.instance, 0) != sizeof state.instance) state.instance = now_ns();
    if (state.instance == 0) state.instance = 1;  // 0 is nobody's
    state.cores = cores_allowed();
    state.count_rank_on_host(0);
    state.provider = open_provider(options, state);
    state.capabilities = state.provider->capabilities();
    ControlResult result;
    const GatePolicy policy = make_gate_policy(state.capabilities, options.settings, result);
    if (!result.ok()) throw Failure(FailureKind::invalid_argument, result.message);
    const EngineLimits limits = engine_limits(options, state.capabilities);
    state.engine = std::make_unique<Engine>(limits, policy);
    state.rank_of_slot.resize(2 * std::size_t{options.outstanding_max});

    state.shared_layout.ranks = options.size;
    create_region("runtime", state.shared_layout.bytes());
    state.shared = {state.regions.front().address, state.shared_layout};
    if (options.counters > 0) create_region("counters", std::uint64_t{options.counters} * sizeof(std::uint64_t));
    LivenessOptions alive;
    alive.rank = options.rank;
    alive.size = options.size;
    alive.instance = state.instance;
    alive.heartbeat_ns = options.heartbeat_ns;
    alive.silence_ns = options.silence_ns;
    alive.use_pidfd = options.liveness == LivenessMode::automatic;
    alive.independent = options.independent;
    state.liveness = std::make_unique<Liveness>(alive, state.shared);
}

Context::~Context() {
    // In a forked child everything here is the parent's: sockets, epoll sets, mappings. Nothing may be closed.
    if (state_ && state_->fork_mark.forked()) {
        static_cast<void>(state_.release());
        return;
    }
    if (state_) close(now_ns() + destructor_drain_ns);
}

std::uint32_t Context::rank() const {
    return state_->options.rank;
}
std::uint32_t Context::size() const {
    return state_->options.size;
}
const ContextOptions& Context::options() const {
    return state_->options;
}
const Capabilities& Context::capabilities() const {
    return state_->capabilities;
}
bool Context::forked() const {
    return state_->fork_mark.forked();
}

bool Context::closed() const {
    return state_->life.load(std::memory_order_acquire) != Life::open;
}

void Context::check_usable() const {
    if (state_->fork_mark.forked())
        throw Failure(FailureKind::state,
                      "this endpoint belongs to the parent of this forked process; create a new one in "
                      "the child, or start children by spawn or forkserver");
    if (closed()) throw Failure(FailureKind::state, "rank " + std::to_string(rank()) + "'s endpoint is closed");
}

void Context::start() {
    check_usable();
    state_->thread.start(*state_);
}

void Context::close(TimeNs until_ns) {
    ContextState& state = *state_;
    if (state.fork_mark.forked()) return;
    Life expected = Life::open;
    if (!state.life.compare_exchange_strong(expected, Life::closing, std::memory_order_acq_rel)) return;
    // Terminate: what was submitted may still end by itself.
    const bool started = state.thread.running();
    const auto idle = [&] {
        const TokenGuard guard(*this, until_ns);
        if (!guard) return false;
        state.turn(20'000);
        return state.engine->idle();
    };
    const auto drain = [&](auto done, TimeNs until) {
        while (started && now_ns() < until) {
            const Doorbell bell(state.shared.doorbell());
            const std::uint32_t seen = bell.seen();
            if (done()) break;
            state.thread.unpark();
            bell.wait(seen, 1'000'000);
        }
    };
    // With a dead peer much of it never will, and the others wait for our word.
    drain(idle, has_fault() ? std::min(until_ns, now_ns() + fault_drain_ns) : until_ns);
    // Tell the others: this is no death.
    state.liveness->publish_leaving();
    tell(now_ns() + farewell_ns);
    // Join, then close: from here nobody but this thread touches the provider.
    state.thread.stop();
    const TokenGuard guard(*this, now_ns() + state.options.timeout_ns);
    state.provider->close();
    const TimeNs now = now_ns();
    for (std::uint32_t lane = 0; lane < state.options.endpoints; ++lane) {
        const EndpointId endpoint{state.endpoint.value + lane};
        state.engine->on_endpoint_error(endpoint, Status::closed, 0, now);
        state.engine->on_endpoint_closed(endpoint, now);
        if (state.replacement.phase != Replacement::Phase::none)
            state.engine->on_endpoint_closed(EndpointId{state.replacement.old_endpoint.value + lane}, now);
    }
    state.life.store(Life::closed, std::memory_order_release);
    state.wake_all();
}

// ---------------------------------------------------------------------------------------------------------- regions

namespace {

RegionId free_region(ContextState& state) {
    for (std::uint32_t i = 0; i < state.regions.size(); ++i)
        if (!state.regions[i].address) return RegionId{i};
    if (state.regions.size() >= state.options.regions_max)
        throw Failure(FailureKind::capacity, "a context holds at most " + std::to_string(state.options.regions_max) +
                                                 " regions, and all are taken; close those that are not needed");
    state.regions.emplace_back();
    return RegionId{static_cast<std::uint32_t>(state.regions.size() - 1)};
}

RegionId enter_region(ContextState& state, RegionRecord record) {
    const RegionId id = free_region(state);
    if (record.name.empty()) record.name = "#" + std::to_string(id.value);
    RegionSpec spec;
    spec.address = record.address;
    spec.bytes = record.bytes;
    spec.fd = record.fd.get();
    ControlResult result;
    {
        const ControlGuard guard(state);
        result = state.provider->register_region(id, spec);
    }
    if (!result.ok())
        throw Failure(result.status == Status::invalid ? FailureKind::invalid_argument : FailureKind::capacity,
                      "region '" + record.name + "' of " + std::to_string(record.bytes) +
                          " bytes could not be registered: " + result.message);
    state.regions[id.value] = std::move(record);
    return id;
}

}  // namespace

RegionId Context::create_region(std::string_view name, std::uint64_t bytes) {
    check_usable();
    const auto fail = [&](const std::string& why) {
        throw Failure(FailureKind::invalid_argument, "region '" + std::string(name) + "' of " + std::to_string(bytes) +
                                                         " bytes cannot be created: " + why);
    };
    if (name.empty() || name.size() > 64 || name.front() == '#')
        fail("a name has 1 to 64 bytes and does not begin with '#'");
    if (bytes == 0 || bytes > (std::uint64_t{1} << 48)) fail("the size must be 1 to 2^48 bytes");
    const std::unique_lock lock(state_->tables);
    for (const RegionRecord& other : state_->regions)
        if (other.address && other.name == name)
            fail("the name is taken by a region of " + std::to_string(other.bytes) + " bytes");
    RegionRecord record;
    record.name = name;
    record.bytes = bytes;
    record.fd = create_memfd(record.name, bytes);
    record.mapping = Mapping(record.fd.get(), bytes, "region '" + record.name + "'");
    record.address = record.mapping.address();
    return enter_region(*state_, std::move(record));
}

RegionId Context::register_region(std::byte* address, std::uint64_t bytes) {
    check_usable();
    if (!address || bytes == 0)
        throw Failure(FailureKind::invalid_argument, "memory of " + std::to_string(bytes) + " bytes at address " +
                                                         std::to_string(reinterpret_cast<std::uintptr_t>(address)) +
                                                         " cannot be registered: both must be above 0");
    const std::unique_lock lock(state_->tables);
    RegionRecord record;
    record.address = address;
    record.bytes = bytes;
    return enter_region(*state_, std::move(record));
}

bool Context::deregister_region(RegionId region, TimeNs until_ns) {
    check_usable();
    ContextState& state = *state_;
    while (true) {
        {
            const TablesChange lock(state);
            const RegionRecord& record = state.region_at(region);
            if (record.name == "runtime" || record.name == "counters")
                throw Failure(FailureKind::state,
                              "region '" + record.name + "' belongs to the endpoint and ends with it");
            const ControlGuard guard(state);
            if (state.engine->region_uses(region) == 0) {
                const ControlResult result = state.provider->deregister_region(region);
                if (result.ok()) {
                    state.regions[region.value] = RegionRecord{};
                    return true;
                }
                // Peers are being asked whether anything of theirs is on its way: turn, and ask again.
                if (result.status != Status::would_block && result.status != Status::refused)
                    throw Failure(FailureKind::state,
                                  "region '" + record.name + "' could not be deregistered: " + result.message);
                state.regions[region.value].held_by = result.message;
            }
            state.turn(20'000);
        }
        if (now_ns() >= until_ns) return false;
        doorbell_slice(doorbell().seen(), std::min(until_ns, now_ns() + 1'000'000));
    }
}

void Context::fail_in_use(RegionId region, std::int64_t timeout_ms) const {
    const std::shared_lock lock(state_->tables);
    const ControlGuard guard(*state_);
    const std::uint32_t uses = state_->engine->region_uses(region);
    const std::string users =
        uses > 0 ? std::to_string(uses) + " operations" : "peers that have not said that they are through with it";
    const RegionRecord& record = state_->region_at(region);
    throw Failure(FailureKind::state, "region '" + record.name + "' is in use by " + users + " after " +
                                          std::to_string(timeout_ms) + " ms; wait for its requests, or give more time" +
                                          (uses == 0 && !record.held_by.empty() ? " (" + record.held_by + ")" : ""));
}

const RegionRecord& ContextState::region_at(RegionId region) const {
    if (region.value >= regions.size() || !regions[region.value].address)
        throw Failure(FailureKind::invalid_argument, "region " + std::to_string(region.value) +
                                                         " does not exist here: " + std::to_string(regions.size()) +
                                                         " were ever created");
    return regions[region.value];
}

RegionId Context::region(std::string_view name) const {
    check_usable();
    const std::shared_lock lock(state_->tables);
    for (std::uint32_t i = 0; i < state_->regions.size(); ++i)
        if (state_->regions[i].address && state_->regions[i].name == name) return RegionId{i};
    throw Failure(FailureKind::invalid_argument,
                  "rank " + std::to_string(rank()) + " has no region '" + std::string(name) + "'");
}

std::byte* Context::region_address(RegionId region) const {
    const std::shared_lock lock(state_->tables);
    return state_->region_at(region).address;
}

std::uint64_t Context::region_bytes(RegionId region) const {
    const std::shared_lock lock(state_->tables);
    return state_->region_at(region).bytes;
}

std::vector<std::byte> Context::region_key(RegionId region) const {
    check_usable();
    const std::shared_lock lock(state_->tables);
    state_->region_at(region);
    const ControlGuard guard(*state_);
    return state_->provider->region_key(region);
}

int Context::region_fd(RegionId region) const {
    const std::shared_lock lock(state_->tables);
    return state_->region_at(region).fd.get();
}

std::vector<std::string> Context::region_names() const {
    const std::shared_lock lock(state_->tables);
    std::vector<std::string> names;
    for (const RegionRecord& record : state_->regions)
        if (record.address && record.fd.get() >= 0) names.push_back(record.name);
    return names;
}

}  // namespace expertwire::runtime
