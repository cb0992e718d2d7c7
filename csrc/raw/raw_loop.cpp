// The raw ceiling: libfabric driven by one loop that does nothing else. It shares no code with the engine, so that a
// cost of the engine cannot hide in what the engine is compared with. One process is one side of a pair; a bench drives
// both over their standard input and output, one line a command:
//
//   raw_loop LIBRARY PROVIDER SOURCE_ADDRESS REGION_BYTES        prints  address NAME BASE KEY
//   peer NAME BASE KEY                                           prints  ready
//   fill BYTES SEED     out[0, BYTES) = f(SEED), in[] = 0        prints  filled
//   run BYTES WINDOW SLOTS MILLISECONDS                          prints  started, sent OPERATIONS POSTS POLLS AGAIN
//   NANOSECONDS serve                                                        prints  started
//     (both go on serving the other side until the next line comes, and then print  served POLLS)
//   check BYTES SEED    how many 8-byte words of in[] are wrong  prints  checked WORDS
//
// A write is fi_write with FI_DELIVERY_COMPLETE, of operation i from and to slot i % SLOTS; at most WINDOW are in
// flight; posts go out until the window is full, completions are read 64 at a time. Every failure prints "failed …" and
// ends the process with status 1; so does the end of standard input, without a word.
#include <dlfcn.h>
#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <cinttypes>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr std::uint64_t kAccess = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
constexpr std::size_t kBatch = 64;                       // completions read at once
constexpr std::uint64_t kStuckNs = 10'000'000'000;       // no completion for so long: the other side is gone
constexpr std::uint64_t kYieldMask = (1 << 5) - 1;       // empty reads of the queue between offers of the core
constexpr std::uint64_t kLinePollsMask = (1 << 10) - 1;  // reads of the queue between looks at standard input

[[noreturn]] void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::printf("failed ");
    std::vprintf(format, arguments);
    std::printf("\n");
    std::fflush(stdout);
    va_end(arguments);
    _exit(1);
}

std::uint64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}

// The word at index i of a fill: other bytes at every place and for every seed.
std::uint64_t word_of(std::uint64_t seed, std::uint64_t index) {
    return (index + 1) * 0x9e37'79b9'7f4a'7c15 ^ seed * 0xbf58'476d'1ce4'e5b9;
}

struct Library {
    decltype(&fi_getinfo) getinfo = nullptr;
    decltype(&fi_dupinfo) dupinfo = nullptr;
    decltype(&fi_fabric) fabric = nullptr;
    decltype(&fi_strerror) strerror = nullptr;
};

template <class Function>
void find(void* handle, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    if (function == nullptr) fail("the library has no %s", name);
}

Library load(const char* path) {
    void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) fail("%s", dlerror());
    Library library;
    find(handle, "fi_getinfo", library.getinfo);
    find(handle, "fi_dupinfo", library.dupinfo);
    find(handle, "fi_fabric", library.fabric);
    find(handle, "fi_strerror", library.strerror);
    return library;
}

struct Counts {
    std::uint64_t operations = 0, posts = 0, polls = 0, again = 0, nanoseconds = 0;
};

class Side {
  public:
    Side(const char* library, const char* provider, const char* source, std::size_t region_bytes)
        : library_(load(library)), bytes_(region_bytes) {
        memory_ = static_cast<std::byte*>(
            mmap(nullptr, 2 * bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
        if (memory_ == MAP_FAILED) fail("%zu bytes of memory: %s", 2 * bytes_, std::strerror(errno));
        open(provider, source);
    }

    void print_address() const {
        std::array<unsigned char, 512> name{};
        std::size_t length = name.size();
        must(fi_getname(&endpoint_->fid, name.data(), &length), "fi_getname");
        std::printf("address ");
        for (std::size_t i = 0; i < length; ++i) std::printf("%02x", name[i]);
        const bool offsets = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) == 0;
        std::printf(" %" PRIu64 " %" PRIu64 "\n", offsets ? bytes_ : reinterpret_cast<std::uintptr_t>(in()),
                    fi_mr_key(registration_));
    }

    void add_peer(const std::string& name, std::uint64_t base, std::uint64_t key) {
        std::vector<unsigned char> raw(name.size() / 2);
        for (std::size_t i = 0; i < raw.size(); ++i)
            raw[i] = static_cast<unsigned char>(std::stoul(name.substr(2 * i, 2), nullptr, 16));
        if (fi_av_insert(addresses_, raw.data(), 1, &peer_, 0, nullptr) != 1) fail("fi_av_insert");
        base_ = base;
        key_ = key;
    }

    void fill(std::uint64_t bytes, std::uint64_t seed) {
        check_room(bytes);
        auto* words = reinterpret_cast<std::uint64_t*>(memory_);
        for (std::uint64_t i = 0; i < bytes / 8; ++i) words[i] = word_of(seed, i);
        std::memset(in(), 0, bytes);
    }

    std::uint64_t wrong_words(std::uint64_t bytes, std::uint64_t seed) const {
        check_room(bytes);
        const auto* words = reinterpret_cast<const std::uint64_t*>(in());
        std::uint64_t wrong = 0;
        for (std::uint64_t i = 0; i < bytes / 8; ++i) wrong += words[i] != word_of(seed, i);
        return wrong;
    }

    Counts run(std::uint64_t bytes, std::uint64_t window, std::uint64_t slots, std::uint64_t milliseconds) {
        check_room(bytes * slots);
        std::vector<fi_context2> contexts(window);
        std::vector<void*> free;
        for (fi_context2& context : contexts) free.push_back(&context);
        Counts counts;
        std::uint64_t slot = 0;
        const std::uint64_t begin = now_ns();
        const std::uint64_t end = begin + milliseconds * 1'000'000;
        std::uint64_t last = begin;
        std::uint64_t now = begin;
        while (now < end || free.size() < window) {
            while (now < end && !free.empty()) {
                const ssize_t outcome = fi_write(endpoint_, memory_ + slot * bytes, bytes, descriptor_, peer_,
                                                 base_ + slot * bytes, key_, free.back());
                if (outcome == -FI_EAGAIN) {
                    ++counts.again;
                    break;
                }
                must(outcome, "fi_write");
                ++counts.posts;
                free.pop_back();
                if (++slot == slots) slot = 0;
            }
            const std::size_t got = read_queue(free);
            ++counts.polls;
            counts.operations += got;
            now = now_ns();
            if (got != 0) last = now;
            if (now - last > kStuckNs) fail("%zu writes in flight and no completion for 10 s", window - free.size());
        }
        counts.nanoseconds = last - begin;
        return counts;
    }

    // Progress for the other side's writes, until a line comes.
    std::uint64_t serve() {
        std::vector<void*> none;
        std::uint64_t polls = 0;
        do {
            if (read_queue(none) != 0) fail("a completion that nobody asked for");
        } while ((++polls & kLinePollsMask) != 0 || !line_is_here());
        return polls;
    }

  private:
    std::byte* in() const { return memory_ + bytes_; }

    void check_room(std::uint64_t bytes) const {
        if (bytes > bytes_ || bytes % 8 != 0) fail("%" PRIu64 " bytes do not fit %zu, in words of 8", bytes, bytes_);
    }

    void must(ssize_t code, const char* call) const {
        if (code < 0) fail("%s: %s", call, library_.strerror(static_cast<int>(-code)));
    }

    std::size_t read_queue(std::vector<void*>& done) {
        std::array<fi_cq_entry, kBatch> entries;
        const ssize_t got = fi_cq_read(queue_, entries.data(), entries.size());
        if (got == -FI_EAGAIN) {
            // Where the sides share a core, the one that waits must not keep the other from it.
            if ((++empty_reads_ & kYieldMask) == 0) sched_yield();
            return 0;
        }
        if (got == -FI_EAVAIL) {
            fi_cq_err_entry error{};
            fi_cq_readerr(queue_, &error, 0);
            fail("a completion: %s", library_.strerror(error.err));
        }
        must(got, "fi_cq_read");
        for (ssize_t i = 0; i < got; ++i) done.push_back(entries[static_cast<std::size_t>(i)].op_context);
        return static_cast<std::size_t>(got);
    }

    static bool line_is_here() {
        pollfd entry{STDIN_FILENO, POLLIN, 0};
        return poll(&entry, 1, 0) > 0;
    }

    void open(const char* provider, const char* source) {
        fi_info* hints = library_.dupinfo(nullptr);
        if (hints == nullptr) fail("fi_dupinfo");
        hints->caps = FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        hints->mode = FI_CONTEXT | FI_CONTEXT2;
        hints->ep_attr->type = FI_EP_RDM;
        hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
        hints->domain_attr->threading = FI_THREAD_DOMAIN;  // one thread: whatever a lock costs is not of the wire
        hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
        hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
        hints->fabric_attr->prov_name = strdup(provider);
        const bool bound = *source != '\0';
        must(library_.getinfo(FI_VERSION(1, 17), bound ? source : nullptr, nullptr,
                              bound ? std::uint64_t{FI_SOURCE} : 0, hints, &info_),
             "fi_getinfo");
        must(library_.fabric(info_->fabric_attr, &fabric_, nullptr), "fi_fabric");
        must(fi_domain(fabric_, info_, &domain_, nullptr), "fi_domain");
        fi_cq_attr queue{};
        queue.format = FI_CQ_FORMAT_CONTEXT;
        queue.size = 4096;
        queue.wait_obj = FI_WAIT_NONE;
        must(fi_cq_open(domain_, &queue, &queue_, nullptr), "fi_cq_open");
        fi_av_attr addresses{};
        must(fi_av_open(domain_, &addresses, &addresses_, nullptr), "fi_av_open");
        must(fi_endpoint(domain_, info_, &endpoint_, nullptr), "fi_endpoint");
        must(fi_ep_bind(endpoint_, &addresses_->fid, 0), "fi_ep_bind(av)");
        must(fi_ep_bind(endpoint_, &queue_->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind(cq)");
        must(fi_enable(endpoint_), "fi_enable");
        must(fi_mr_reg(domain_, memory_, 2 * bytes_, kAccess, 0, 1, 0, &registration_, nullptr), "fi_mr_reg");
        if ((info_->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0) {
            must(fi_mr_bind(registration_, &endpoint_->fid, 0), "fi_mr_bind");
            must(fi_mr_enable(registration_), "fi_mr_enable");
        }
        descriptor_ = fi_mr_desc(registration_);
    }

    Library library_;
    std::size_t bytes_;
    std::byte* memory_ = nullptr;  // out, then in
    fi_info* info_ = nullptr;
    fid_fabric* fabric_ = nullptr;
    fid_domain* domain_ = nullptr;
    fid_cq* queue_ = nullptr;
    fid_av* addresses_ = nullptr;
    fid_ep* endpoint_ = nullptr;
    fid_mr* registration_ = nullptr;
    void* descriptor_ = nullptr;
    fi_addr_t peer_ = FI_ADDR_UNSPEC;
    std::uint64_t base_ = 0, key_ = 0;
    std::uint64_t empty_reads_ = 0;
};

bool obey(Side& side, const std::string& line) {
    std::array<char, 1024> name{};
    std::uint64_t a = 0, b = 0, c = 0, d = 0;
    if (std::sscanf(line.c_str(), "peer %1023s %" SCNu64 " %" SCNu64, name.data(), &a, &b) == 3) {
        side.add_peer(name.data(), a, b);
        std::printf("ready\n");
    } else if (std::sscanf(line.c_str(), "fill %" SCNu64 " %" SCNu64, &a, &b) == 2) {
        side.fill(a, b);
        std::printf("filled\n");
    } else if (std::sscanf(line.c_str(), "check %" SCNu64 " %" SCNu64, &a, &b) == 2) {
        std::printf("checked %" PRIu64 "\n", side.wrong_words(a, b));
    } else if (std::sscanf(line.c_str(), "run %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64, &a, &b, &c, &d) == 4) {
        std::printf("started\n");
        std::fflush(stdout);
        const Counts sent = side.run(a, b, c, d);
        std::printf("sent %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", sent.operations, sent.posts,
                    sent.polls, sent.again, sent.nanoseconds);
        std::fflush(stdout);
        std::printf("served %" PRIu64 "\n", side.serve());
    } else if (line.rfind("serve", 0) == 0) {
        std::printf("started\n");
        std::fflush(stdout);
        std::printf("served %" PRIu64 "\n", side.serve());
    } else {
        return false;
    }
    return true;
}

}  // namespace

int main(int count, char** words) {
    if (count != 5) {
        std::fprintf(stderr, "raw_loop LIBRARY PROVIDER SOURCE_ADDRESS REGION_BYTES\n");
        return 2;
    }
    setvbuf(stdin, nullptr, _IONBF, 0);  // poll() and fgets() must see the same
    Side side(words[1], words[2], words[3], std::strtoull(words[4], nullptr, 10));
    side.print_address();
    std::fflush(stdout);
    std::array<char, 2048> line{};
    while (std::fgets(line.data(), line.size(), stdin) != nullptr) {
        if (line[0] != '\n' && !obey(side, line.data())) fail("no such command: %s", line.data());
        std::fflush(stdout);
    }
    _exit(0);  // nothing of libfabric's is closed: its exit handlers would wait for a peer that has gone
}
