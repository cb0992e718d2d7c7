// Four ranks as threads of one process, for a build with ThreadSanitizer (`make sanitize`): caller, progress thread and
// a thread that watches share each context, over dispatches, combines and close in another order by rank. What two
// ranks share lies in two mappings, which the sanitizer cannot relate: it judges the threads of one rank.
//
// race PROVIDER ROUNDS [LIBRARY...]: exit status 0 when every row came back.
#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "exchange/combine.hpp"
#include "exchange/dispatch.hpp"
#include "exchange/exchange.hpp"
#include "runtime/exchange_driver.hpp"
#include "runtime/statistics.hpp"

namespace {

using namespace expertwire;

constexpr std::uint32_t ranks = 4;
constexpr std::uint64_t tokens = 40;
constexpr std::uint64_t row_bytes = 128;
constexpr std::uint64_t data_bytes = 1 << 20;
constexpr TimeNs wait_ns = 60'000'000'000;
const std::vector<std::uint32_t> node_of = {0, 0, 1, 1};

struct Peer {
    std::unique_ptr<runtime::Context> context;
    std::vector<std::byte> blob;
};

exchange::Shape shape_of(std::uint32_t rank) {
    return {rank, exchange::NodeTable(node_of), 8, 4, 64 << 10};
}

Peer make(std::uint32_t rank, const std::string& provider, const std::vector<std::string>& libraries) {
    runtime::ContextOptions options;
    options.rank = rank;
    options.size = ranks;
    options.provider = provider;
    options.libraries = libraries;
    if (provider != "local") options.source_address = "127.0.0.1";
    options.timeout_ns = wait_ns;
    options.heartbeat_ns = 20'000'000;    // often: pulses are what the progress thread does meanwhile
    options.silence_ns = 60'000'000'000;  // a sanitized build is slow
    Peer peer{std::make_unique<runtime::Context>(options), {}};
    const exchange::Layout layout(shape_of(rank));
    peer.context->create_region("control", layout.control_bytes());
    peer.context->create_region("staging", layout.staging_bytes(rank));
    peer.context->create_region("data", data_bytes);
    peer.blob = peer.context->blob();
    return peer;
}

void wire(std::vector<Peer>& peers, std::uint32_t rank) {
    for (std::uint32_t other = 0; other < ranks; ++other) {
        if (other == rank) continue;
        peers[rank].context->add_peer(other, peers[other].blob);
        if (node_of[other] != node_of[rank]) continue;
        runtime::Context& near = *peers[other].context;
        for (const std::string& name : near.region_names())
            peers[rank].context->map_peer(other, name, near.region_fd(near.region(name)));
    }
}

bool refused(const char* what, const std::string& why) {
    std::fprintf(stderr, "race: %s was refused: %s\n", what, why.c_str());
    return false;
}

// One dispatch to every rank and its combine. Rows hold 1.0, so that each sum is the number of ranks.
bool round_trip(runtime::ExchangeDriver& driver, exchange::Exchange& exchange) {
    const std::vector<std::uint16_t> x(tokens * row_bytes / 2, 0x3F80);
    const std::vector<std::uint8_t> in_rank(tokens * ranks, 1);
    std::string wrong;
    exchange::DispatchRequest there;
    there.x = reinterpret_cast<const std::byte*>(x.data());
    there.tokens = tokens;
    there.row_bytes = row_bytes;
    there.in_rank = in_rank.data();
    there.num_experts = ranks;
    there.expert_first = {0, 1, 2, 3, 4};
    there.offer_capacity = data_bytes / 2;
    std::vector<std::byte> spill;  // not needed: the offer has room for all rows
    there.allocate = [&spill](std::uint64_t bytes) {
        spill.resize(bytes);
        return spill.data();
    };
    const auto dispatch = exchange.dispatch(there, wrong);
    if (!dispatch) return refused("dispatch", wrong);
    driver.run(*dispatch, wait_ns, [] {});
    std::vector<std::uint16_t> out(tokens * row_bytes / 2, 0);
    exchange::CombineRequest back;
    back.rows = dispatch->received();
    back.x = exchange.mine().data + dispatch->extent().rows;
    back.row_bytes = row_bytes;
    back.out = reinterpret_cast<std::byte*>(out.data());
    back.handle = dispatch->handle();
    back.offer_offset = data_bytes / 2;
    back.offer_capacity = data_bytes / 2;
    const auto combine = exchange.combine(back, wrong);
    if (!combine) return refused("combine", wrong);
    driver.run(*combine, wait_ns, [] {});
    for (const std::uint16_t value : out)
        if (value != 0x4080) return false;
    return true;
}

void watch(runtime::Context& context, const std::atomic<bool>& over) {
    while (!over.load()) {
        try {
            context.statistics();
            context.fault();
            context.take_notifications();
        } catch (const runtime::Failure&) {
            // closed meanwhile: an answer too
        }
        context.has_fault();
        context.pulse((context.rank() + 1) % ranks);
        context.turn(10'000);
        std::this_thread::yield();
    }
}

bool live(std::vector<Peer>& peers, std::uint32_t rank, int rounds, std::barrier<>& together) {
    runtime::Context& context = *peers[rank].context;
    bool good = true;
    {
        runtime::ExchangeDriver driver(context, shape_of(rank));
        exchange::Exchange exchange(shape_of(rank), driver, driver.data_bytes());
        std::atomic<bool> over{false};
        std::thread watcher([&] { watch(context, over); });
        for (int round = 0; round < rounds && good; ++round) good = round_trip(driver, exchange);
        together.arrive_and_wait();
        context.close(runtime::now_ns() + (rank % 2 ? 0 : 200'000'000));  // while it is being watched
        over.store(true);
        watcher.join();
    }
    return good;
}

}  // namespace

int main(int count, char** words) {
    if (count < 3) {
        std::fprintf(stderr, "usage: race PROVIDER ROUNDS [LIBRARY...]\n");
        return 2;
    }
    const std::vector<std::string> libraries(words + 3, words + count);
    std::atomic<bool> good{true};
    try {
        std::vector<Peer> peers;
        for (std::uint32_t rank = 0; rank < ranks; ++rank) peers.push_back(make(rank, words[1], libraries));
        for (std::uint32_t rank = 0; rank < ranks; ++rank) wire(peers, rank);
        for (Peer& peer : peers) peer.context->start();
        std::barrier<> together(ranks);
        std::vector<std::thread> threads;
        for (std::uint32_t rank = 0; rank < ranks; ++rank)
            threads.emplace_back([&, rank] {
                try {
                    if (!live(peers, rank, std::atoi(words[2]), together)) good = false;
                } catch (const std::exception& error) {
                    std::fprintf(stderr, "rank %u: %s\n", rank, error.what());
                    std::_Exit(1);  // the others wait for this one
                }
            });
        for (std::thread& thread : threads) thread.join();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    std::printf("race: %s over %s\n", good ? "every row came back" : "ROWS ARE WRONG", words[1]);
    return good ? 0 : 1;
}
