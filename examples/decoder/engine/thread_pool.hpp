#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace engine {

/// Workers that wait for a job and all do it, each with its number.
class ThreadPool {
   public:
    explicit ThreadPool(int workers) {
        for (int i = 0; i < workers; ++i) threads_.emplace_back([this, i] { serve(i); });
    }
    ~ThreadPool() {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        changed_.notify_all();
        for (auto& thread : threads_) thread.join();
    }
    ThreadPool(ThreadPool const&) = delete;
    ThreadPool& operator=(ThreadPool const&) = delete;

    int workers() const { return static_cast<int>(threads_.size()); }

    /// Returns when every worker has finished; rethrows what was thrown first.
    void run(std::function<void(int)> job) {
        std::unique_lock lock(mutex_);
        job_ = std::move(job);
        failure_ = nullptr;
        busy_ = workers();
        ++round_;
        changed_.notify_all();
        changed_.wait(lock, [this] { return busy_ == 0; });
        if (failure_) std::rethrow_exception(failure_);
    }

   private:
    void serve(int worker) {
        for (int done = 0;; ++done) {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return stopping_ || round_ > done; });
            if (stopping_) return;
            lock.unlock();
            std::exception_ptr failure;
            try {
                job_(worker);
            } catch (...) {
                failure = std::current_exception();
            }
            lock.lock();
            if (failure && !failure_) failure_ = failure;
            if (--busy_ == 0) changed_.notify_all();
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::function<void(int)> job_;
    std::exception_ptr failure_;
    int round_ = 0, busy_ = 0;
    bool stopping_ = false;
};

}  // namespace engine
