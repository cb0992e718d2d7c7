// The floor under lanes.py: a write of 4 KiB beside chunks of bulk to the same peer, one at a time, with nothing of
// ours between the loops and libfabric.
//
//   lanes_floor LIBRARY PROVIDER SOURCE_ADDRESS CHUNK_BYTES WINDOW ENDPOINTS DOMAINS SECONDS
//
// Two processes, each of which only polls and yields its core after 32 empty polls, delivery-complete. CHUNK_BYTES 0:
// no bulk. ENDPOINTS 2: bulk has an endpoint of its own. DOMAINS 2: and a domain with a queue, which both sides poll
// once for every four polls of the small one's. Prints: P50_US P90_US P99_US WRITES BULK_GB_S
#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr std::size_t kSmall = 4096, kBulk = 32u << 20, kWindowMax = 64;

void must(long code, const char* call) {
    if (code >= 0) return;
    std::fprintf(stderr, "%s failed: %ld\n", call, code);
    _exit(1);
}

std::uint64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}

struct Options {
    const char *library, *provider, *source;
    std::size_t chunk_bytes;
    std::uint32_t window, endpoints, domains;
    double seconds;
};

struct Side {
    struct Name {
        std::array<unsigned char, 256> bytes{};
        std::uint64_t base = 0, key = 0;
    };
    struct Board {
        std::atomic<int> ready{0}, over{0};
        Name names[2][2];
    };

    struct Path {  // one endpoint and what it needs
        fid_domain* domain = nullptr;
        fid_cq* queue = nullptr;
        fid_av* addresses = nullptr;
        fid_ep* endpoint = nullptr;
        fid_mr* registration = nullptr;
        fi_addr_t peer = 0;
        std::uint64_t base = 0, key = 0;
    };

    Side(const Options& given, Board& blackboard, int which) : options(given), board(blackboard), number(which) {
        memory = static_cast<std::byte*>(
            mmap(nullptr, kSmall + kBulk, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
        std::memset(memory, which + 1, kSmall + kBulk);
        open();
        board.ready.fetch_add(1);
        while (board.ready.load() < 2) usleep(1000);
        for (std::uint32_t i = 0; i < options.endpoints; ++i) {
            Path& path = paths[i];
            const Name& name = board.names[1 - number][i];
            must(fi_av_insert(path.addresses, name.bytes.data(), 1, &path.peer, 0, nullptr) - 1, "fi_av_insert");
            path.base = name.base;
            path.key = name.key;
        }
    }

    void open() {
        void* handle = dlopen(options.library, RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) must(-1, dlerror());
        const auto dupinfo = reinterpret_cast<decltype(&fi_dupinfo)>(dlsym(handle, "fi_dupinfo"));
        const auto getinfo = reinterpret_cast<decltype(&fi_getinfo)>(dlsym(handle, "fi_getinfo"));
        const auto make_fabric = reinterpret_cast<decltype(&fi_fabric)>(dlsym(handle, "fi_fabric"));
        fi_info *hints = dupinfo(nullptr), *info = nullptr;
        hints->caps = FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        hints->mode = FI_CONTEXT | FI_CONTEXT2;
        hints->ep_attr->type = FI_EP_RDM;
        hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
        hints->domain_attr->threading = FI_THREAD_SAFE;  // as ours
        hints->fabric_attr->prov_name = strdup(options.provider);
        must(getinfo(FI_VERSION(1, 17), options.source, nullptr, FI_SOURCE, hints, &info), "fi_getinfo");
        fid_fabric* fabric = nullptr;
        must(make_fabric(info->fabric_attr, &fabric, nullptr), "fi_fabric");
        for (std::uint32_t i = 0; i < options.endpoints; ++i) {
            Path& path = paths[i];
            if (i < options.domains) {
                must(fi_domain(fabric, info, &path.domain, nullptr), "fi_domain");
                fi_cq_attr queue{};
                queue.format = FI_CQ_FORMAT_CONTEXT;
                queue.size = 4096;
                queue.wait_obj = FI_WAIT_FD;  // as ours
                must(fi_cq_open(path.domain, &queue, &path.queue, nullptr), "fi_cq_open");
                fi_av_attr addresses{};
                must(fi_av_open(path.domain, &addresses, &path.addresses, nullptr), "fi_av_open");
                must(fi_mr_reg(path.domain, memory, kSmall + kBulk,
                               FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 7, 0, &path.registration,
                               nullptr),
                     "fi_mr_reg");
            } else {
                path = paths[0];
            }
            must(fi_endpoint(path.domain, info, &path.endpoint, nullptr), "fi_endpoint");
            must(fi_ep_bind(path.endpoint, &path.addresses->fid, 0), "fi_ep_bind(av)");
            must(fi_ep_bind(path.endpoint, &path.queue->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind(cq)");
            must(fi_enable(path.endpoint), "fi_enable");
            Name& name = board.names[number][i];
            std::size_t length = name.bytes.size();
            must(fi_getname(&path.endpoint->fid, name.bytes.data(), &length), "fi_getname");
            const bool offsets = (info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) == 0;
            name.base = offsets ? 0 : reinterpret_cast<std::uintptr_t>(memory);
            name.key = fi_mr_key(path.registration);
        }
    }

    // The number of completions; the context of the last small one sets `small_done`.
    std::size_t read(Path& path) {
        std::array<fi_cq_entry, 16> entries;
        const ssize_t got = fi_cq_read(path.queue, entries.data(), entries.size());
        if (got == -FI_EAGAIN) return 0;
        must(got, "fi_cq_read");
        for (ssize_t i = 0; i < got; ++i) {
            void* const context = entries[static_cast<std::size_t>(i)].op_context;
            if (context == &small_context) {
                small_done = true;
            } else {
                free.push_back(static_cast<fi_context2*>(context));
                bulk_bytes += options.chunk_bytes;
            }
        }
        return static_cast<std::size_t>(got);
    }

    bool poll() {
        bool moved = read(paths[0]) > 0;
        if (options.domains > 1 && ++turns % 4 == 0) moved = read(paths[1]) > 0 || moved;
        if (!moved && ++empty % 32 == 0) sched_yield();
        return moved;
    }

    bool write(Path& path, std::size_t offset, std::size_t bytes, void* context) {
        iovec piece{memory + offset, bytes};
        void* descriptor = fi_mr_desc(path.registration);
        fi_rma_iov target{path.base + offset, bytes, path.key};
        fi_msg_rma message{};
        message.msg_iov = &piece;
        message.desc = &descriptor;
        message.iov_count = 1;
        message.addr = path.peer;
        message.rma_iov = &target;
        message.rma_iov_count = 1;
        message.context = context;
        const ssize_t code = fi_writemsg(path.endpoint, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE);
        if (code == -FI_EAGAIN) return false;
        must(code, "fi_writemsg");
        return true;
    }

    void feed() {
        while (options.chunk_bytes > 0 && !free.empty()) {
            if (!write(paths[options.endpoints - 1], kSmall + bulk_at, options.chunk_bytes, free.back())) return;
            free.pop_back();
            bulk_at = (bulk_at + options.chunk_bytes) % kBulk;
        }
    }

    void run() {
        std::vector<fi_context2> contexts(kWindowMax);
        for (std::uint32_t i = 0; i < options.window; ++i) free.push_back(&contexts[i]);
        std::vector<double> times;
        const std::uint64_t warm = now_ns() + 300'000'000;
        const std::uint64_t end = warm + static_cast<std::uint64_t>(options.seconds * 1e9);
        std::uint64_t begin = 0;
        for (std::uint64_t now = now_ns(); now < end;) {
            const std::uint64_t before = now;
            small_done = false;
            while (!write(paths[0], 0, kSmall, &small_context)) poll();
            while (!small_done) {
                feed();
                poll();
            }
            now = now_ns();
            if (now < warm) continue;
            if (begin == 0) {
                begin = now;
                bulk_bytes = 0;
                continue;
            }
            times.push_back(1e-3 * static_cast<double>(now - before));
        }
        const double seconds = 1e-9 * static_cast<double>(now_ns() - begin);
        std::sort(times.begin(), times.end());
        const auto at = [&](double share) {
            return times[static_cast<std::size_t>(share * static_cast<double>(times.size()))];
        };
        std::printf("%.1f %.1f %.1f %zu %.3f\n", at(0.5), at(0.9), at(0.99), times.size(),
                    1e-9 * static_cast<double>(bulk_bytes) / seconds);
        std::fflush(stdout);
        board.over.store(1);
    }

    void serve() {
        while (board.over.load() == 0 && getppid() != 1) {
            for (int i = 0; i < 64; ++i) poll();
        }
    }

    Options options;
    Board& board;
    int number;
    std::byte* memory = nullptr;
    Path paths[2];
    fi_context2 small_context{};
    std::vector<fi_context2*> free;
    std::size_t bulk_at = 0;
    std::uint64_t bulk_bytes = 0, turns = 0, empty = 0;
    bool small_done = false;
};

}  // namespace

int main(int count, char** words) {
    if (count != 9) {
        std::fprintf(stderr, "usage: see the file\n");
        return 2;
    }
    const Options options{words[1],
                          words[2],
                          words[3],
                          std::strtoul(words[4], nullptr, 10),
                          static_cast<std::uint32_t>(std::strtoul(words[5], nullptr, 10)),
                          static_cast<std::uint32_t>(std::strtoul(words[6], nullptr, 10)),
                          static_cast<std::uint32_t>(std::strtoul(words[7], nullptr, 10)),
                          std::strtod(words[8], nullptr)};
    void* shared = mmap(nullptr, sizeof(Side::Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    auto& board = *new (shared) Side::Board{};
    const pid_t child = fork();
    if (child == 0) {
        Side(options, board, 1).serve();
        _exit(0);
    }
    Side(options, board, 0).run();
    int status = 0;
    waitpid(child, &status, 0);
    _exit(status);
}
